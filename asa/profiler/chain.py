"""A training step over a chain of components, with a time stamp at every boundary, forward and backward.

Components are timed *in place*, inside one step of the whole chain. A component that runs alone would have its own data
in the cache and the allocator ready, which is not so in training. Backward needs no cut in the graph either: autograd
runs nodes in the reverse order of their creation and accumulates a parameter's gradient as soon as it is known. So when
a gradient reaches the boundary between two components, everything behind the boundary is done. The times of all
components therefore add up to the step, including what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asa.instruments.execution import begin_step
from asa.ir.profile import Precision
from asa.profiler.clock import Clock
from asa.tracing.autocast import autocast
from asa.tracing.whole import tensors_of


@dataclass(frozen=True)
class Lap:
    """Seconds of every component in one step, in chain order. ``host_s`` are the seconds in which the host issued the
    work."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    host_s: float

    @property
    def seconds(self) -> float:
        """Sum of forward and backward seconds of all components."""
        return sum(self.forward) + sum(self.backward)

    @property
    def host_share(self) -> float:
        """Host seconds over device seconds; close to 1 where the device waits for the host."""
        return self.host_s / max(self.seconds, 1e-12)


@dataclass(frozen=True)
class Marks:
    """Time stamps of one step. Component i runs forward from ``forward[i]`` to ``forward[i + 1]``, and backward from
    ``backward[i + 1]`` to ``backward[i]``.

    A component without a backward (no parameters in it or before it) has two equal stamps there.
    """

    forward: list[Any]
    backward: list[Any]

    def read(self, clock: Clock) -> Lap:
        """Times between the stamps."""
        back = list(reversed(self.backward))
        host = sum(clock.host_seconds(self.forward)) + sum(clock.host_seconds(back))
        forward, backward = clock.seconds(self.forward), clock.seconds(back)
        return Lap(forward=tuple(forward), backward=tuple(reversed(backward)), host_s=host)


class Chain:
    """Components that run one after the other, on ``device``, at ``precision``, in training mode.

    Each takes one tensor and returns (main, side outputs): the main output goes to the next component.
    """

    def __init__(self, components: Sequence[nn.Module], device: torch.device, precision: Precision) -> None:
        self.components = tuple(components)
        self.device = device
        self.precision: Precision = precision
        self._parameters = tuple(dict.fromkeys(p for c in components for p in c.parameters()))

    def clear(self) -> None:
        """Set gradients to None, as a training loop does before each step."""
        for p in self._parameters:
            p.grad = None

    def step(self, x: Tensor, mark: Callable[[], Any], inner: Callable[[], Any] | None = None) -> Marks:
        """Run forward and backward of ``x`` (a batch, without gradient), with synthetic gradients at the outputs.
        Gradients are kept.

        ``mark`` is called at the ends of forward and backward. ``inner`` (default: ``mark``) is called at the
        boundaries between components, in order of time.
        """
        inner = inner or mark
        begin_step()
        last = len(self.components)
        before: list[Any] = [None] * (last + 1)
        sides: list[Tensor] = []
        value = x
        forward = [mark()]
        with autocast(self.precision, self.device):
            for i, component in enumerate(self.components, 1):
                value, *extra = component(value)
                if extra:
                    # A new autograd node, newer than those of the side outputs, which then run before the stamp.
                    sides.extend(extra)
                    value = value.view_as(value)
                if i < last and value.requires_grad:
                    value.register_hook(_setter(before, i, inner))
                forward.append(inner() if i < last else mark())
        outputs = [t for t in (value, *sides) if t.requires_grad]
        gradients = synthetic_gradients(outputs, len(x))
        before[last] = mark()
        torch.autograd.backward(outputs, gradients)
        before[0] = mark()
        return Marks(forward=forward, backward=[before[0] if b is None else b for b in before])

    def lap(self, x: Tensor, clock: Clock) -> Lap:
        """Run and time one step, after clearing gradients."""
        self.clear()
        clock.synchronize()
        return self.step(x, clock.mark).read(clock)

    def seconds(self, x: Tensor, clock: Clock) -> float:
        """Seconds of one step without the stamps between components, after clearing gradients. A device that waits for
        its host would also wait for the host to make those stamps."""
        self.clear()
        clock.synchronize()
        marks = self.step(x, clock.mark, lambda: None)
        forward, backward = marks.forward, marks.backward
        return sum(clock.seconds([forward[0], forward[-1]]) + clock.seconds([backward[-1], backward[0]]))


def _setter(marks: list[Any], index: int, mark: Callable[[], Any]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        marks[index] = mark()

    return hook


def synthetic_gradients(outputs: Sequence[Tensor], samples: int) -> list[Tensor]:
    """Random gradients with the magnitude of a mean over ``samples``. (Equal values would vanish in a
    normalization.)"""
    return [torch.randn_like(t) / samples for t in outputs]


def whole_step(model: nn.Module, x: Tensor, clock: Clock, device: torch.device, precision: Precision) -> float:
    """Seconds of forward and backward of the unsplit model; gradients are cleared before and after."""
    model.zero_grad(set_to_none=True)
    begin_step()
    clock.synchronize()
    start = clock.mark()
    with autocast(precision, device):
        outputs = [t for t in tensors_of(model(x)) if t.requires_grad]
    middle = clock.mark()
    gradients = synthetic_gradients(outputs, len(x))
    resumed = clock.mark()
    torch.autograd.backward(outputs, gradients)
    forward, _, backward = clock.seconds([start, middle, resumed, clock.mark()])
    model.zero_grad(set_to_none=True)
    return forward + backward
