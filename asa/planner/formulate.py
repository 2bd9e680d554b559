"""From a space to the numeric problem of one stage width and number of microbatches."""

from __future__ import annotations

from asa.cost.pricing import Way
from asa.cost.step import BoundaryCost, ComponentCost
from asa.ir.layout import Layout
from asa.ir.units import GIB
from asa.planner.candidate import Candidate, Prices
from asa.planner.problem import MS, Choice, Config, Edge, Problem
from asa.planner.space import Allowed, anything


class Formulation:
    """A :class:`Problem` and the way back from its choices to candidates."""

    def __init__(self, problem: Problem, ways: tuple[tuple[Way, ...], ...]) -> None:
        self.problem = problem
        self.ways = ways

    def candidate(self, choice: Choice, origin: str = "asa") -> Candidate:
        """The candidate that a choice stands for."""
        return Candidate(
            origin=origin,
            width=self.problem.width,
            num_microbatches=self.problem.num_microbatches,
            ways=tuple(ways[c] for ways, c in zip(self.ways, choice, strict=True)),
        )


def formulate(prices: Prices, width: int, num_microbatches: int, allowed: Allowed = anything) -> Formulation | None:
    """The problem, or None where some component cannot run at all in a stage of that width."""
    space = prices.space
    graph, overlap = space.profile.graph, space.cluster.overlap
    last = len(graph) - 1
    pricer = prices.pricer(width, num_microbatches)
    forced = max(0.0, -overlap.saving) * overlap.communication_slowdown
    found: list[tuple[Layout, ...]] = []
    rows: list[tuple[Config, ...]] = []
    kept: list[tuple[Way, ...]] = []
    numbers: dict[Layout, int] = {}
    for i in range(len(graph)):
        options = []
        for way in space.ways(i, width, num_microbatches, allowed):
            cost = pricer.component(i, way)
            ends = [pricer.entry(way.layout)] if i == 0 else []
            ends += [pricer.exit(way.layout)] if i == last else []
            number = numbers.setdefault(way.layout, len(numbers))
            options.append((_config(number, way, cost, ends, forced), way))
        if not options:
            return None
        options = _undominated(options, max(0.0, overlap.saving) * overlap.communication_slowdown)
        rows.append(tuple(c for c, _ in options))
        kept.append(tuple(w for _, w in options))
        found.append(tuple(dict.fromkeys(w.layout for _, w in options)))
    edges = tuple(
        {(numbers[a], numbers[b]): _edge(pricer.boundary(i + 1, a, b)) for a in found[i] for b in found[i + 1]}
        for i in range(last)
    )
    problem = Problem(
        width=width,
        num_microbatches=num_microbatches,
        names=tuple(c.name for c in graph.components),
        layouts=tuple(numbers),
        configs=tuple(rows),
        edges=edges,
        release=pricer.releases,
        saving=max(0.0, overlap.saving),
        sp=overlap.compute_slowdown,
        sc=overlap.communication_slowdown,
        capacity=space.capacity(width) / GIB,
    )
    return Formulation(problem, tuple(kept))


def _config(number: int, way: Way, cost: ComponentCost, ends: list[BoundaryCost], forced: float) -> Config:
    own = cost.compute_s + cost.update_s + cost.blocking_s + cost.update_communication_s + cost.sync_s * (1 + forced)
    held = cost.footprint
    return Config(
        layout=number,
        data=way.data,
        tensor=way.tensor,
        work=(own + sum(e.blocking_s for e in ends)) * MS,
        window=cost.window_s * MS,
        prompt=cost.prompt_sync_s * MS,
        late=cost.late_sync_s * MS,
        state=held.state / GIB,
        activations=(held.activations + sum(e.footprint.activations for e in ends)) / GIB,
        gradients=held.gradients / GIB,
        transient=(held.transient + sum(e.footprint.transient for e in ends)) / GIB,
    )


def _edge(cost: BoundaryCost) -> Edge:
    return Edge(
        cost=cost.blocking_s * MS,
        activations=cost.footprint.activations / GIB,
        transient=cost.footprint.transient / GIB,
    )


def _undominated(options: list[tuple[Config, Way]], hidden: float) -> list[tuple[Config, Way]]:
    """Without configurations that another one of the same layout replaces in every plan at no loss.

    ``hidden`` is what a ms of synchronisation saves at most: a configuration with more of it may gain that much.
    """

    def better(a: Config, b: Config) -> bool:
        gain = hidden * (max(0.0, b.prompt - a.prompt) + max(0.0, b.late - a.late))
        return (
            a.layout == b.layout
            and a.window >= b.window
            and a.work <= b.work - gain
            and a.state <= b.state
            and a.activations <= b.activations
            and a.gradients <= b.gradients
            and a.transient <= b.transient
        )

    left: list[tuple[Config, Way]] = []
    for j, (config, way) in enumerate(options):
        others = [c for k, (c, _) in enumerate(options) if k < j and better(c, config)]
        others += [c for k, (c, _) in enumerate(options) if k > j and better(c, config) and not better(config, c)]
        if not others:
            left.append((config, way))
    return left
