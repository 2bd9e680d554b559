"""Peak memory of a rank of a stage, with the components that are wrapped together as one unit.

Prices of single components assume that all neighbours run the same way, that no state is shared with them, and that
all gradients exist from the start of a component's backward. For mixed strategies, or if whole parameters are assigned
to ranks, this is up to a fifth too much. In a complete plan the wrapped units are known.

Solvers add up lower bounds for any neighbours (``least_state`` and ``least_transient`` of
:class:`asa.cost.menu.PricedWays`), so their bounds hold for every plan. This module decides whether a plan fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asa.cost.memory.peak import Footprint, Peak, peak

if TYPE_CHECKING:
    from asa.cost.pricing import Pricer
    from asa.cost.step import BoundaryCost, ComponentCost
    from asa.cost.way import Way


def wrapped(ways: Sequence[Way]) -> Iterator[range]:
    """Ranges of neighbours with one layout and data strategy, which the executor wraps as one unit."""
    start = 0
    for i in range(1, len(ways) + 1):
        if i == len(ways) or (ways[i].layout, ways[i].data) != (ways[start].layout, ways[start].data):
            yield range(start, i)
            start = i


@dataclass(frozen=True)
class Wrapped:
    """Memory of the components ``placed``, wrapped as one unit: ``parts`` has the footprint of each. ``repeated``:
    bytes of state that these count more than once; ``remaining``: bytes held until the whole backward ends."""

    placed: range
    parts: tuple[Footprint, ...]
    repeated: float
    remaining: float


def wrapped_memory(pricer: Pricer, alike: range, ways: Sequence[Way], *, whole: bool) -> Wrapped:
    """Memory of components ``alike``, run as ``ways`` say, wrapped as one unit. ``whole``: the stage has no others."""
    joint, remaining = pricer.joint(ways[0]), 0.0
    joined = joint and not whole and not pricer.states.prefetching  # then they gather for each other
    unmade = pricer.num_microbatches == 1 and pricer.times.unmade
    last = max((i for i in alike if pricer.graph.components[i].parameter_bytes), default=alike.start)
    parts = []
    for i, way in zip(alike, ways, strict=True):
        memory = pricer.footprint(pricer.figures(i, way, alike)) if joined else pricer.cost(i, way).footprint
        parts.append(pricer.without_unmade(i, way, memory, ending=i == last) if unmade else memory)
    if joint:
        remaining = next(filter(None, map(pricer.remaining_bytes, alike, ways)), 0.0)
    return Wrapped(alike, tuple(parts), _repeated(pricer, alike, ways), remaining)


def repeated_bytes(pricer: Pricer, start: int, ways: Sequence[Way]) -> float:
    """Bytes of state that the components of a stage, from ``start`` on, count more than once."""
    if not any(map(pricer.joint, ways)):
        return 0.0
    runs = ((range(start + r.start, start + r.stop), ways[r.start : r.stop]) for r in wrapped(ways))
    return sum(_repeated(pricer, alike, some) for alike, some in runs)


def _repeated(pricer: Pricer, alike: range, ways: Sequence[Way]) -> float:
    first = ways[0]
    shared = pricer.joint(first) and not first.offload and len({(w.tensor, w.offload) for w in ways}) == 1
    return pricer.states.repeated(alike, first) if shared else 0.0


def stage_peak(
    pricer: Pricer, start: int, ways: Sequence[Way], components: Sequence[ComponentCost],
    boundaries: Sequence[BoundaryCost], in_flight: int,
) -> Peak:  # fmt: skip
    """The peak of the stage's rank that holds most. Its ``index`` counts from component ``start``."""
    ahead = 1 < pricer.num_microbatches <= in_flight
    inlets, outlet = [b.footprint for b in boundaries[:-1]], boundaries[-1].footprint
    if not (ahead or pricer.times.unmade or any(pricer.joint(w) for w in ways)):
        return peak(ended([c.footprint for c in components], outlet), inlets, in_flight)
    parts, transient, repeated = list[Footprint](), list[float](), 0.0
    alike = list(wrapped(ways))
    for run in alike:
        indices = range(start + run.start, start + run.stop)
        unit = wrapped_memory(pricer, indices, ways[run.start : run.stop], whole=len(alike) == 1)
        repeated += unit.repeated
        if unit.remaining:  # in the backward of all in front
            transient = [t + unit.remaining for t in transient]
        parts += unit.parts
        transient += (p.transient for p in unit.parts)
    parts = [p if p.transient == t else replace(p, transient=t) for p, t in zip(parts, transient, strict=True)]
    if not ahead:
        return _without_repeated(peak(ended(parts, outlet), inlets, in_flight), repeated)
    # All forwards run before the first backward. During this one gradients are created, as with one microbatch; after
    # it, gradients of all components exist, and one microbatch fewer holds activations.
    fresh = [_unmade(p, pricer.states.state_cost(start + i, ways[i]).costs.added) for i, p in enumerate(parts)]
    first = peak(
        ended(fresh, outlet), [b if start + i == 0 else replace(b, state=0.0) for i, b in enumerate(inlets)], in_flight
    )
    later = peak(ended(parts, outlet), inlets, in_flight - 1)
    return _without_repeated(max(first, later, key=lambda p: p.total), repeated)


def _without_repeated(highest: Peak, repeated: float) -> Peak:
    """The peak without ``repeated`` bytes, which are counted for several components but held once."""
    return replace(highest, total=highest.total - repeated, state=highest.state - repeated)


def _unmade(footprint: Footprint, added: float) -> Footprint:
    """The footprint in the first backward: accumulated gradients are not held yet, but created by it."""
    return replace(footprint, state=footprint.state - added, gradients=added)


def ended(components: Sequence[Footprint], outlet: Footprint) -> list[Footprint]:
    """The footprints of components, with that of the stage's output added to the last one."""
    *others, last = components
    return [
        *others,
        replace(
            last,
            state=last.state + outlet.state,
            activations=last.activations + outlet.activations,
            transient=last.transient + outlet.transient,
        ),
    ]
