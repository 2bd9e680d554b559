"""Detection of models whose results depend on the plan: components that still draw from a rank's own generator, and
models that mix the samples of a batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asa.errors import InvalidInputError
from asa.ir.graph import DEPENDS
from asa.tracing import outcome
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import foreign_random, foreign_state, mode, preserved

_SHOWN = 3

FOREIGN = "Python's or numpy's random"
"""Name that stands for generators other than torch's, in a list of torch operators."""
GIVEN = "a generator that it keeps"
"""Name that stands for operators that are given a generator and draw rows one after another, in such a list."""
OWN = "a generator of Python's or numpy's that it keeps"
"""Name that stands for such a generator, if it is asked for more numbers the more samples there are."""
FILLING = {
    getattr(torch.ops.aten, name)
    for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
}
"""Operators that fill a tensor with random numbers."""
MADE = {torch.ops.aten.randn, torch.ops.aten.rand, torch.ops.aten.randint}
"""Operators that make a tensor of random numbers, of a shape."""


class _Watch(TorchDispatchMode):
    """Context that records the names of operators that change the state of a generator. Operators that can draw do not
    always do so (attention without dropout)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.operators: dict[str, None] = {}
        self._device = device

    def _states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if (kwargs or {}).get("generator") is not None:
            by_row = by_row_of(func, args)
            self.operators[GIVEN if by_row else func.overloadpacket.__name__] = None
        before = self._states()
        result = func(*args, **(kwargs or {}))
        if self._device.type == "meta":  # the meta device draws nothing: count every operator that can draw
            self.operators[func.overloadpacket.__name__] = None
        if any(not torch.equal(a, b) for a, b in zip(before, self._states(), strict=True)):
            self.operators[func.overloadpacket.__name__] = None
        return result


def by_row_of(func: Any, args: Any) -> bool:
    """Whether a random operator draws row after row, so that a rank can draw those of all samples."""
    return func.overloadpacket in MADE or (
        func.overloadpacket in FILLING and not any(isinstance(a, Tensor) for a in args[1:])
    )


def _bits(value: Any) -> Any:
    """The part of a generator of numpy's that has its state; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return None
    return value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator


def _state_of(value: Any) -> Any:
    return value.getstate() if isinstance(value, random.Random) else _bits(value).state


def _begin_at(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    else:
        _bits(value).state = state


def _asks_by_samples(component: nn.Module, batch: Tensor) -> bool:
    """Whether a generator of Python's or numpy's that ``component`` keeps ends otherwise with fewer samples."""
    within = [m for top in (component, *vars(component).values()) if isinstance(top, nn.Module) for m in top.modules()]
    values = [v for m in within for v in vars(m).values()]
    kept = [v for v in values if isinstance(v, random.Random) or _bits(v) is not None]
    begins, ends = [_state_of(v) for v in kept], set()
    for rows in (batch, batch[:1]) if kept else ():
        try:
            component(rows.clone())
            ends.add(repr([_state_of(v) for v in kept]))
        except Exception:  # whatever a model's code raises for one sample
            ends |= {"", "unknown"}
        for value, state in zip(kept, begins, strict=True):
            _begin_at(value, state)
    return len(ends) > 1


def drawing(components: Iterable[TracedComponent], batch: Tensor) -> dict[str, tuple[str, ...]]:
    """Names of the components that draw random numbers themselves in their current mode, and the torch operators with
    which they do; call after :func:`asa.sharding.layers.dropout.make_reproducible`.

    ``batch`` is the model's input, on the components' device; their context knows its samples. Python's own generator
    and numpy's are named :data:`FOREIGN`, one that the program made with torch :data:`GIVEN`. Others are not detected.
    """
    operators = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[batch.device] if batch.is_cuda else []):
        for component in components:
            before, by_samples = foreign_state(), _asks_by_samples(component, batch)
            with _Watch(batch.device) as watch, foreign_random():
                batch = component(batch)[0]
                if foreign_state()[: len(before)] != before:
                    watch.operators[FOREIGN] = None
                if by_samples:
                    watch.operators[OWN] = None
            if watch.operators:
                operators[component.name] = tuple(watch.operators)
    return operators


def draws_note(operators_of: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A sentence about the result of :func:`drawing`; empty if there are no such components.

    >>> draws_note({"head": ("randn_like",)})
    ('head draws random numbers of its own (randn_like): what training computes depends on the plan',)
    """
    if not operators_of:
        return ()
    who = f"{several(list(operators_of))} {'draws' if len(operators_of) == 1 else 'draw'} random numbers of "
    how = ", ".join(dict.fromkeys(name for operators in operators_of.values() for name in operators))
    whose = "its" if len(operators_of) == 1 else "their"
    return (f"{who}{whose} own ({how}): {DEPENDS}",)


def mixing_note(model: nn.Module, batch: Tensor, tolerance: float) -> tuple[str, ...]:
    """A sentence on a model whose output for two samples differs in evaluation from that for each alone, relative to
    the largest, by more than ``tolerance``; empty for others. ``batch`` has two samples; the model is left unchanged.
    """
    try:
        with preserved(model), mode(model, False), torch.no_grad():
            together, first, second = (outcome(model, rows.clone())[0] for rows in (batch, batch[:1], batch[1:]))
    except InvalidInputError:  # it does not run on one sample, or not in this precision
        return ()
    separate = torch.cat((first, second)) if first.dim() else first
    if separate.shape != together.shape:
        return ()
    error = float((together - separate).abs().max() / separate.abs().max().clamp_min(1e-300))
    if not error > tolerance:
        return ()
    return (
        f"the model mixes the samples of a batch (in evaluation its output for two samples differs by {error:.1e} from "
        f"that for each alone): {DEPENDS}",
    )


def several(names: Sequence[str]) -> str:
    """The first three names, and the number of others.

    >>> several(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
