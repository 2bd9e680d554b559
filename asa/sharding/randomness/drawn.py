"""Random numbers that a component's own code draws (``torch.randn_like`` in ``forward``, Python's ``random``), made
equal under every plan and different for each sample.

In every call, such a component uses generators whose seed is a function of the run's seed, step, microbatch and the
component's name. A tensor with one row for each of a rank's samples is drawn for the whole microbatch, of which the
rank keeps its own rows. Other tensors are equal on all ranks. A generator that the program made stays in use, and is
asked for the rows of the whole microbatch, too: its numbers are those of one device.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asa.sharding.randomness.generators import FILLING, MADE, by_row_of
from asa.sharding.randomness.samples import SampleContext, named
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import foreign_random
from asa.zoo.data import draws

_aten = torch.ops.aten
_ALIKE = {_aten.randn_like, _aten.rand_like, _aten.randint_like}


class _Drawing(TorchDispatchMode):
    """Context in which random operators draw from ``generator``, for all samples of the microbatch."""

    def __init__(self, context: SampleContext, generator: torch.Generator) -> None:
        super().__init__()
        self._total, self._rows = context.total, context.rows
        self._generator = generator

    def _by_sample(self, shape: Any) -> bool:
        num_rows = self._rows.stop - self._rows.start
        return len(shape) > 0 and shape[0] == num_rows and num_rows < self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **options)
        given = options.pop("generator", None)
        generator = self._generator if given is None else given
        packet, draw_options = func.overloadpacket, {**options, "generator": generator}
        if packet in FILLING and by_row_of(func, args):
            target = args[0]
            if not self._by_sample(target.shape):
                return func(*args, **draw_options)
            full = target.new_empty((self._total, *target.shape[1:]))
            func(full, *args[1:], **draw_options)
            return target.copy_(full[self._rows])
        if packet in _ALIKE or packet in MADE:
            return self._new(packet, args, options, generator)
        if packet is _aten.bernoulli and len(args) == 1:
            chance = args[0]
            uniform = self._filled(chance, lambda t: t.uniform_(generator=generator))
            return (uniform < chance).to(chance.dtype)
        if packet is _aten.native_dropout:
            x, p, training = args
            if not training:
                return func(*args, **options)
            mask = self._filled(x, lambda t: t.uniform_(generator=generator)) >= p
            return x * mask / (1 - p), mask
        # Other operations draw from the default generator, which ``draw_options`` has seeded by the same key.
        return func(*args, **options) if given is None else func(*args, **draw_options)

    def _filled(self, like: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
        if not self._by_sample(like.shape):
            return fill(torch.empty_like(like, memory_format=torch.contiguous_format))
        return fill(like.new_empty((self._total, *like.shape[1:])))[self._rows]

    def _new(self, packet: Any, args: Any, options: dict[str, Any], generator: torch.Generator) -> Any:
        if packet in MADE:
            at = next(i for i, a in enumerate(args) if not isinstance(a, int))  # behind the bounds of randint
            shape = list(args[at])
            by_sample = self._by_sample(shape)
            shape[0:1] = [self._total] if by_sample else shape[0:1]
            overload = "low_generator" if at == 2 else "generator"
            values = getattr(packet, overload)(*args[:at], shape, *args[at + 1 :], **options, generator=generator)
            return values[self._rows] if by_sample else values
        like, *bounds = args
        values = torch.empty_like(like, **{k: v for k, v in options.items() if k in ("dtype", "layout", "device")})
        if packet is _aten.randint_like:
            low, high = bounds if len(bounds) == 2 else (0, *bounds)
            return self._filled(values, lambda t: t.random_(low, high, generator=generator))
        gaussian = packet is _aten.randn_like
        return self._filled(values, lambda t: (t.normal_ if gaussian else t.uniform_)(generator=generator))


def keyed(component: TracedComponent, context: SampleContext, *, foreign: bool) -> None:
    """Make the random numbers of ``component`` a function of seed, step and sample. ``foreign`` says that it also draws
    from Python's or numpy's generators."""
    original, site = component.forward, named(f"{component.name} draws")

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        key = draws.key(context.seed, context.step, context.start, site, context.call(f"{component.name} draws"))
        generator = torch.Generator(x.device).manual_seed(key & (2**63 - 1))
        with seeded(key, foreign), _Drawing(context, generator):
            return original(x)

    component.__dict__["forward"] = forward


@contextmanager
def seeded(key: int, foreign: bool) -> Iterator[None]:
    """Context in which torch's generators (and Python's and numpy's if ``foreign``) are seeded by ``key``; they are
    restored afterwards."""
    with torch.random.fork_rng(), foreign_random():
        torch.default_generator.manual_seed(key & (2**63 - 1))
        if foreign:
            random.seed(key)
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                numpy.random.seed(key & (2**32 - 1))
        yield
