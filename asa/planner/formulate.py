"""From a space to numbers: all components on stages of one width with one number of microbatches."""

from __future__ import annotations

from asa.cost.pricing import Pricer, Way
from asa.cost.step import BoundaryCost, ComponentCost
from asa.ir.layout import Layout
from asa.ir.units import GIB
from asa.planner.candidate import Candidate, Prices
from asa.planner.problem import MS, Chain, Choice, Config, Edge, Problem
from asa.planner.space import Allowed, anything


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
) -> Formulation | None:
    """The numbers, or None where some component cannot run at all in a stage of that width.

    ``busy``: ranks of the whole pipeline that such stages are part of; None for a single stage. ``first``: its first
    rank, where devices are unequal.
    """
    space = prices.space
    graph, overlap = space.profile.graph, space.cluster.overlap
    pricer = prices.pricer(width, num_microbatches, busy, first)
    forced = max(0.0, -overlap.saving) * overlap.communication_slowdown
    hidden = max(0.0, overlap.saving) * overlap.communication_slowdown
    found: list[tuple[Layout, ...]] = []
    rows: list[tuple[Config, ...]] = []
    kept: list[tuple[Way, ...]] = []
    numbers: dict[Layout, int] = {}
    for i in range(len(graph)):
        options = []
        for way in space.ways(i, width, num_microbatches, allowed):
            number = numbers.setdefault(way.layout, len(numbers))
            options.append((_config(number, way, pricer.component(i, way), forced), way))
        if not options:
            return None
        options = _undominated(options, hidden, piped=busy is not None)
        rows.append(tuple(c for c, _ in options))
        kept.append(tuple(w for _, w in options))
        found.append(tuple(dict.fromkeys(w.layout for _, w in options)))
    chain = Chain(
        width=width,
        num_microbatches=num_microbatches,
        names=tuple(c.name for c in graph.components),
        layouts=tuple(numbers),
        configs=tuple(rows),
        edges=_edges(pricer, found, numbers),
        inlets=_ends(pricer, found, numbers, inlet=True, whole=busy is None),
        outlets=_ends(pricer, found, numbers, inlet=False, whole=busy is None),
        release=pricer.releases,
        saving=max(0.0, overlap.saving),
        sp=overlap.compute_slowdown,
        sc=overlap.communication_slowdown,
        capacity=space.room(first, width, width if busy is None else busy) / GIB,
    )
    return Formulation(chain, tuple(kept))


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
    """What beginning (or ending) a stage with each component costs; only at the very ends for a single stage."""
    price, used = (pricer.inlet, 0) if inlet else (pricer.outlet, len(found) - 1)
    return tuple(
        {numbers[x]: _end(price(i, x), inlet) for x in layouts} if not whole or i == used else {}
        for i, layouts in enumerate(found)
    )


def _end(cost: BoundaryCost, inlet: bool) -> Edge:
    """An outlet holds nothing of its own: what it makes whole is the component's output."""
    found = _edge(cost)
    if inlet:
        return found
    return Edge(cost=found.cost, forward=found.forward, backward=found.backward, once=found.once)


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
        activations=cost.footprint.activations / GIB,
        transient=cost.footprint.transient / GIB,
        forward=cost.forward_s * MS,
        backward=cost.backward_s * MS,
        once=cost.wrapper_s * MS,
    )


def _undominated(options: list[tuple[Config, Way]], hidden: float, *, piped: bool) -> list[tuple[Config, Way]]:
    """Without configurations that another one of the same layout replaces in every plan at no loss.

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
            and a.state <= b.state
            and a.activations <= b.activations
            and a.gradients <= b.gradients
            and a.transient <= b.transient
        )

    alike: dict[int, list[tuple[Config, Way]]] = {}
    for option in options:
        alike.setdefault(option[0].layout, []).append(option)
    left: list[tuple[Config, Way]] = []
    for group in alike.values():
        for j, (config, way) in enumerate(group):
            others = [c for k, (c, _) in enumerate(group) if k < j and better(c, config)]
            others += [c for k, (c, _) in enumerate(group) if k > j and better(c, config) and not better(config, c)]
            if not others:
                left.append((config, way))
    return left
