"""The peak of a rank of a stage, where it depends on which neighbours run alike.

The sum over components prices each as if all components around it ran as it does, as if it were alone with its state,
and as if all its gradients were there from the start of its backward. Where strategies are mixed, or parameters are
shared out whole, that is up to a fifth too much. For a complete plan it is known which components are wrapped together.

Solvers add up the least that each component holds, whatever runs beside it (``least_state`` and ``least_transient`` of
:class:`asa.cost.menu.PricedWays`), so their bounds hold for every plan. Whether their answer fits is decided here.
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
    """What the components ``placed``, wrapped as one unit, hold: ``parts`` for each of them, ``repeated``: bytes of
    state that these count more than once, and ``left``: bytes that stay until all components in front are done."""

    placed: range
    parts: tuple[Footprint, ...]
    repeated: float
    left: float


def made(pricer: Pricer, alike: range, ways: Sequence[Way], *, whole: bool) -> Wrapped:
    """What components ``alike`` hold, run in these ways and wrapped as one unit. ``whole``: the stage has no others."""
    joint, first = pricer.joint(ways[0]), ways[0]
    repeated = left = 0.0
    if joint and len({(w.tensor, w.offload) for w in ways}) == 1 and not first.offload:
        repeated = pricer.states.repeated(alike, first)
    near = joint and not whole and not pricer.states.prefetching  # then they gather for each other
    last = max((i for i in alike if pricer.graph.components[i].parameter_bytes), default=alike.start)
    parts = []
    for i, way in zip(alike, ways, strict=True):
        own = pricer.footprint(pricer.figures(i, way, alike)) if near else pricer.component(i, way).footprint
        parts.append(pricer.as_made(i, way, own, ending=i == last))
    if joint:
        left = next(filter(None, map(pricer.left, alike, ways)), 0.0)
    return Wrapped(alike, tuple(parts), repeated, left)


def held(
    pricer: Pricer, start: int, ways: Sequence[Way], components: Sequence[ComponentCost],
    boundaries: Sequence[BoundaryCost], in_flight: int,
) -> Peak:  # fmt: skip
    """The peak of the stage's fullest rank; components are counted from ``start``, and so is ``index``."""
    ahead = 1 < pricer.num_microbatches <= in_flight
    inlets, outlet = [b.footprint for b in boundaries[:-1]], boundaries[-1].footprint
    if not (ahead or pricer.times.unmade or any(pricer.joint(w) for w in ways)):
        return peak(ended([c.footprint for c in components], outlet), inlets, in_flight)
    parts, repeated = list[Footprint](), 0.0
    alike = list(wrapped(ways))
    for run in alike:
        placed = range(start + run.start, start + run.stop)
        found = made(pricer, placed, ways[run.start : run.stop], whole=len(alike) == 1)
        repeated += found.repeated
        if found.left:  # in the backward of all in front
            parts = [replace(p, transient=p.transient + found.left) for p in parts]
        parts += found.parts
    if not ahead:
        return _less(peak(ended(parts, outlet), inlets, in_flight), repeated)
    # All microbatches are ahead when the first comes back, whose gradients are made meanwhile, as those of a single
    # one are; and when it is through, so are its activations.
    fresh = [_unmade(p, pricer.states.kept(start + i, ways[i]).costs.added) for i, p in enumerate(parts)]
    first = peak(
        ended(fresh, outlet), [b if start + i == 0 else replace(b, state=0.0) for i, b in enumerate(inlets)], in_flight
    )
    later = peak(ended(parts, outlet), inlets, in_flight - 1)
    return _less(max(first, later, key=lambda p: p.total), repeated)


def _less(found: Peak, repeated: float) -> Peak:
    """The peak without bytes that are counted for every component but held once."""
    return replace(found, total=found.total - repeated, state=found.state - repeated)


def _unmade(footprint: Footprint, added: float) -> Footprint:
    """The footprint before microbatches have added up any gradients: these are made only now."""
    return replace(footprint, state=footprint.state - added, gradients=added)


def ended(components: Sequence[Footprint], outlet: Footprint) -> list[Footprint]:
    """The footprints with the stage's output added to the last component, whole where that is another tensor."""
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
