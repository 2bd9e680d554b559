"""From a space to numbers: all components on stages of one width with one number of microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from asa.cost.pricing import Pricer, Way
from asa.cost.step import BoundaryCost, ComponentCost
from asa.ir.layout import Layout
from asa.ir.units import GIB
from asa.planner.candidate import Candidate, Prices
from asa.planner.problem import MS, Chain, Choice, Config, Edge, Problem
from asa.planner.space import Allowed, anything

Option = tuple[Config, Way]


class Formulation:
    """A :class:`Chain` and the way back from choices in it to candidates."""

    def __init__(self, chain: Chain, ways: tuple[tuple[Way, ...], ...]) -> None:
        self.chain = chain
        self.ways = ways
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        """All of it as a single stage."""
        if self._problem is None:
            self._problem = self.chain.stage(0, len(self.chain.names))
        return self._problem

    def picked(self, start: int, choice: Choice) -> tuple[Way, ...]:
        """The ways that a choice for components from ``start`` on stands for."""
        return tuple(self.ways[i][c] for i, c in enumerate(choice, start))

    def candidate(self, choice: Choice, origin: str = "asa") -> Candidate:
        """The candidate of a single stage that a choice stands for."""
        return Candidate(
            origin=origin,
            widths=(self.chain.width,),
            num_microbatches=self.chain.num_microbatches,
            ways=self.picked(0, choice),
        )


def formulate(
    prices: Prices,
    width: int,
    num_microbatches: int,
    allowed: Allowed = anything,
    *,
    busy: int | None = None,
    first: int = 0,
    every: bool = False,
) -> Formulation | None:
    """The numbers, or None where some component cannot run at all in a stage of that width.

    ``busy``: ranks of the whole pipeline that such stages are part of; None for a single stage. ``first``: its first
    rank, where devices are unequal. Where memory cannot bind, whatever is chosen, ways that only save memory are left
    out (a checkpoint takes as long again in backward as forward, of which less can hide synchronisation), but with
    ``every``.
    """
    space = prices.space
    graph, overlap = space.profile.graph, space.cluster.overlap
    pricer = prices.pricer(width, num_microbatches, busy, first)
    forced = max(0.0, -overlap.saving) * overlap.communication_slowdown
    hidden = max(0.0, overlap.saving) * overlap.communication_slowdown
    offered = [list(space.ways(i, width, num_microbatches, allowed)) for i in range(len(graph))]
    if not all(offered):
        return None
    numbers = {layout: k for k, layout in enumerate(dict.fromkeys(w.layout for ways in offered for w in ways))}
    found = [tuple(dict.fromkeys(w.layout for w in ways)) for ways in offered]
    ends = (
        _ends(pricer, found, numbers, inlet=True, whole=busy is None),
        _ends(pricer, found, numbers, inlet=False, whole=busy is None),
    )
    edges = _edges(pricer, found, numbers)
    capacity = space.room(first, width, width if busy is None else busy) / GIB

    def priced(ways: list[list[Way]]) -> list[list[Option]]:
        return [
            [(_config(numbers[w.layout], w, pricer.component(i, w), forced), w) for w in row]
            for i, row in enumerate(ways)
        ]

    plain = offered if every else [_without_saving(i, ways, allowed) for i, ways in enumerate(offered)]
    options = priced(plain)
    most = _most(options, (*edges, *ends[0], *ends[1]), 1 if busy is None else num_microbatches)
    roomy = not every and most <= capacity and overlap.communication_slowdown >= 1
    if not roomy and plain != offered:
        options = priced(offered)
    options = [_undominated(row, hidden, piped=busy is not None, roomy=roomy) for row in options]
    chain = Chain(
        width=width,
        num_microbatches=num_microbatches,
        names=tuple(c.name for c in graph.components),
        layouts=tuple(numbers),
        configs=tuple(tuple(c for c, _ in row) for row in options),
        edges=edges,
        inlets=ends[0],
        outlets=ends[1],
        release=pricer.releases,
        saving=max(0.0, overlap.saving),
        sp=overlap.compute_slowdown,
        sc=overlap.communication_slowdown,
        capacity=capacity,
    )
    return Formulation(chain, tuple(tuple(w for _, w in row) for row in options))


def _without_saving(index: int, ways: list[Way], allowed: Allowed) -> list[Way]:
    """Without those that are another one with a checkpoint."""
    return [w for w in ways if not w.checkpoint or not allowed(index, replace(w, checkpoint=False))]


def _most(options: list[list[Option]], between: Iterable[dict[Any, Edge]], in_flight: int) -> float:
    """GiB that no choice for any of the components, however they are cut into stages, has at its peak."""
    found, moving = 0.0, 0.0
    for row in options:
        found += max(c.state + c.gradients for c, _ in row) + in_flight * max(c.activations for c, _ in row)
        moving = max(moving, max(c.transient for c, _ in row))
    passing = 0.0
    for edges in between:
        if edges:
            found += max(e.state + in_flight * e.activations for e in edges.values())
            passing = max(passing, max(e.transient for e in edges.values()))
    return found + moving + 3 * passing


def _edges(
    pricer: Pricer, found: list[tuple[Layout, ...]], numbers: dict[Layout, int]
) -> tuple[dict[tuple[int, int], Edge], ...]:
    """Boundaries that look alike, as between repeated blocks, are one and the same."""
    known: dict[tuple[object, ...], dict[tuple[int, int], Edge]] = {}
    edges = []
    for i in range(1, len(found)):
        key = (pricer.alike(i), found[i - 1], found[i])
        if key not in known:
            known[key] = {
                (numbers[a], numbers[b]): _edge(pricer.boundary(i, a, b)) for a in found[i - 1] for b in found[i]
            }
        edges.append(known[key])
    return tuple(edges)


def _ends(
    pricer: Pricer, found: list[tuple[Layout, ...]], numbers: dict[Layout, int], *, inlet: bool, whole: bool
) -> tuple[dict[int, Edge], ...]:
    """What beginning (or ending) a stage with each component costs; only at the very ends for a single stage. Ends that
    look alike are one and the same."""
    price, used = (pricer.inlet, 0) if inlet else (pricer.outlet, len(found) - 1)
    known: dict[tuple[object, ...], dict[int, Edge]] = {}
    ends: list[dict[int, Edge]] = []
    for i, layouts in enumerate(found):
        if whole and i != used:
            ends.append({})
            continue
        place = i if inlet else i + 1
        key = (pricer.alike(place) if 0 < place < len(found) else place, layouts)
        if key not in known:
            known[key] = {numbers[x]: _edge(price(i, x)) for x in layouts}
        ends.append(known[key])
    return tuple(ends)


def _config(number: int, way: Way, cost: ComponentCost, forced: float) -> Config:
    m, held = cost.num_microbatches, cost.footprint
    forward = cost.forward_s + cost.forward_communication_s
    backward = cost.backward_s + cost.backward_communication_s
    once = cost.bucket_s + cost.update_s + cost.update_communication_s + cost.sync_s * forced
    return Config(
        layout=number,
        data=way.data,
        tensor=way.tensor,
        checkpoint=way.checkpoint,
        offload=way.offload,
        work=(m * (forward + backward) + once + cost.sync_s) * MS,
        window=cost.window_s * MS,
        prompt=cost.prompt_sync_s * MS,
        late=cost.late_sync_s * MS,
        state=held.state / GIB,
        activations=held.activations / GIB,
        gradients=held.gradients / GIB,
        transient=held.transient / GIB,
        forward=forward * MS,
        backward=backward * MS,
        once=once * MS,
        bucket=cost.bucket_s * MS,
    )


def _edge(cost: BoundaryCost) -> Edge:
    return Edge(
        cost=cost.blocking_s * MS,
        state=cost.footprint.state / GIB,
        activations=cost.footprint.activations / GIB,
        transient=cost.footprint.transient / GIB,
        forward=cost.forward_s * MS,
        backward=cost.backward_s * MS,
        once=cost.wrapper_s * MS,
    )


def _undominated(options: list[Option], hidden: float, *, piped: bool, roomy: bool) -> list[Option]:
    """Without configurations that another one of the same layout replaces in every plan at no loss; of time alone where
    memory is ``roomy``.

    ``hidden`` is what a ms of synchronisation saves at most: a configuration with more of it may gain that much.
    ``piped``: a microbatch's time may hide behind other stages where work once per step does not, so both count.
    """

    def better(a: Config, b: Config) -> bool:
        gain = hidden * (max(0.0, b.prompt - a.prompt) + max(0.0, b.late - a.late))
        return (
            a.window >= b.window
            and a.forward <= b.forward
            and a.backward <= b.backward
            and a.work <= b.work - gain
            and (not piped or a.once + a.prompt + a.late <= b.once + b.prompt + b.late - gain)
            and (
                roomy
                or (
                    a.state <= b.state
                    and a.activations <= b.activations
                    and a.gradients <= b.gradients
                    and a.transient <= b.transient
                )
            )
        )

    alike: dict[int, list[Option]] = {}
    for option in options:
        alike.setdefault(option[0].layout, []).append(option)
    left: list[Option] = []
    for group in alike.values():
        for j, (config, way) in enumerate(group):
            others = [c for k, (c, _) in enumerate(group) if k < j and better(c, config)]
            others += [c for k, (c, _) in enumerate(group) if k > j and better(c, config) and not better(config, c)]
            if not others:
                left.append((config, way))
    return left
