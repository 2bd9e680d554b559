"""The numeric problem of a space: all components on stages of one width, with one number of microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.menu import Menu
from asa.cost.pricing import Pricer, Way
from asa.ir.cluster import Overlap
from asa.ir.layout import Layout
from asa.ir.units import GIB
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Allowed, anything
from asa.planner.stage.pareto import begins, efficient
from asa.planner.stage.problem import COLUMNS, JOINT, MS, Chain, Choice, Joints, Problem, Row, Sides


class Formulation:
    """A :class:`Chain`, and the ways for which the choices in it stand."""

    def __init__(self, chain: Chain, ways: tuple[tuple[Way, ...], ...]) -> None:
        self.chain = chain
        self.ways = ways
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        """All components as a single stage."""
        if self._problem is None:
            self._problem = self.chain.stage(0, len(self.chain.names))
        return self._problem

    def picked(self, start: int, choice: Choice) -> tuple[Way, ...]:
        """The ways for which a choice for components from ``start`` on stands."""
        return tuple(self.ways[i][c] for i, c in enumerate(choice, start))

    def candidate(self, choice: Choice, origin: str = "asa") -> Candidate:
        """The candidate of a single stage for which a choice stands."""
        return Candidate(
            origin=origin,
            widths=(self.chain.width,),
            num_microbatches=self.chain.num_microbatches,
            ways=self.picked(0, choice),
        )


_NEVER_GIB = 1e6
"""GiB of state that no usual device has, but small enough that sums with it keep nine digits of the other terms."""


@dataclass(frozen=True)
class _Besides:
    """A restriction that also allows plain replicas of ``components``."""

    allowed: Allowed
    components: frozenset[int]

    def __call__(self, index: int, way: Way) -> bool:
        plain = way.data.strategy == "replicate" and not way.checkpoint
        return self.allowed(index, way) or (plain and index in self.components)


def formulate(
    prices: Prices,
    width: int,
    num_microbatches: int,
    allowed: Allowed = anything,
    *,
    busy: int | None = None,
    first: int = 0,
    every: bool = False,
    likely_tight: bool = False,
    wrapped: bool = False,
) -> Formulation | None:
    """The formulation; None if some component cannot run at all in a stage of that width.

    In a pipeline, other stages may run a component that ``allowed`` excludes here. It is then present with more state
    than any device holds (but not with ``every``). If memory cannot bind, ways that only save memory are left out, but
    not with ``every``: a checkpoint makes backward longer by one forward, and hides no more synchronisation.

    ``busy`` is the number of ranks of the whole pipeline; None for a single stage. ``first`` is the stage's first rank,
    for unequal devices. ``likely_tight`` says that memory is likely to bind. With ``every``, each component holds
    what it would hold if all around it ran alike, which is about what a plan holds, or more; otherwise the least that
    it holds, for bounds. With ``wrapped``, the memory of a way may depend on neighbours that run alike, so only such a
    way may replace it."""
    space, overlap = prices.space, prices.space.cluster.overlap
    pricer = prices.pricer(width, num_microbatches, busy, first)
    menu = prices.menu(pricer, allowed)
    samples = [space.samples(layout, num_microbatches) for layout in menu.layouts]
    offered = menu.enough(samples, prices.fewest)
    kept_out: frozenset[int] = frozenset()
    if busy is not None and not every:
        kept_out = frozenset(range(len(space.profile.graph))) - set(menu.component[offered].tolist())
    if kept_out:
        menu = prices.menu(pricer, _Besides(allowed, kept_out))
        samples = [space.samples(layout, num_microbatches) for layout in menu.layouts]
        offered = menu.enough(samples, prices.fewest)
    if len(set(menu.component[offered].tolist())) < len(space.profile.graph):
        return None
    forced = max(0.0, -overlap.saving) * overlap.communication_slowdown
    layouts_of = _layouts(menu, offered, len(space.profile.graph))
    numbers = {menu.layouts[k]: j for j, k in enumerate(dict.fromkeys(k for row in layouts_of for k in row))}
    ends = (
        _ends(pricer, menu.layouts, layouts_of, numbers, inlet=True, whole=busy is None),
        _ends(pricer, menu.layouts, layouts_of, numbers, inlet=False, whole=busy is None),
    )
    edges = _edges(pricer, menu.layouts, layouts_of, numbers)
    capacity = space.room(first, width, width if busy is None else busy) / GIB
    time_saving = offered if every else offered & ~menu.saving
    options = _Options(menu, pricer, np.flatnonzero(offered if likely_tight else time_saving), forced, counted=every)
    options_that_count = options if not likely_tight else options.among(time_saving)
    most = _most(options_that_count, (*edges, *ends[0], *ends[1]), 1 if busy is None else num_microbatches)
    all_fit = not every and most <= capacity and overlap.communication_slowdown >= 1
    if all_fit:
        options = options_that_count
    elif not likely_tight and (time_saving != offered).any():
        options = _Options(menu, pricer, np.flatnonzero(offered), forced, counted=every)
    kept = options.undominated(overlap, piped=busy is not None, all_fit=all_fit, wrapped=wrapped)
    rows = options.rows(kept, numbers)
    for i in kept_out:
        rows[i].values[:, COLUMNS.index("state")] += max(_NEVER_GIB, 2 * capacity)
    chain = Chain(
        width=width,
        num_microbatches=num_microbatches,
        names=tuple(c.name for c in space.profile.graph.components),
        layouts=tuple(numbers),
        configs=rows,
        edges=edges,
        inlets=ends[0],
        outlets=ends[1],
        release=pricer.states.released,
        saving=max(0.0, overlap.saving),
        sp=overlap.compute_slowdown,
        sc=overlap.communication_slowdown,
        capacity=capacity,
        over=options.over(),
    )
    return Formulation(chain, tuple(tuple(row.ways) for row in rows))


def _layouts(menu: Menu, offered: Any, count: int) -> list[tuple[int, ...]]:
    """Layouts that each component may have, in the order of its ways."""
    layouts_of: list[dict[int, None]] = [{} for _ in range(count)]
    for i, k in zip(menu.component[offered].tolist(), menu.layout[offered].tolist(), strict=True):
        layouts_of[i][k] = None
    return [tuple(row) for row in layouts_of]


class _Options:
    """Ways of a menu with their prices, a row for each way: ms and GiB in columns
    :data:`asa.planner.stage.problem.COLUMNS`."""

    def __init__(self, menu: Menu, pricer: Pricer, which: Any, forced: float, *, counted: bool) -> None:
        self._menu, self.which = menu, which
        self.component, self.layout = menu.component[which], menu.layout[which]
        x = menu.priced(pricer, which)
        sync = x.prompt + x.late
        once = x.once + sync * forced
        times = [x.forward, x.backward, x.bucket, once, x.prompt, x.late, x.window]
        self.counted = np.stack([x.state, x.activations, x.gradients, x.transient], axis=1) / GIB
        memory = [x.state if counted else x.least_state, x.activations, x.gradients]
        memory += [x.transient if counted else x.least_transient, np.zeros(len(which)) if counted else x.added]
        self.values = np.stack([t * MS for t in times] + [h / GIB for h in memory], axis=1)
        self.work = (pricer.num_microbatches * (x.forward + x.backward) + once + sync) * MS

    def among(self, which: Any) -> _Options:
        """The options that a mask over the menu keeps."""
        subset, keep = copy(self), which[self.which]
        subset.which, subset.values, subset.work = self.which[keep], self.values[keep], self.work[keep]
        subset.counted = self.counted[keep]
        subset.component, subset.layout = self.component[keep], self.layout[keep]
        return subset

    def most(self, column: str) -> Any:
        """The largest value of each component in a column of memory, whatever its neighbours run."""
        return self._largest(self.counted[:, COLUMNS.index(column) - COLUMNS.index("state")])

    def over(self) -> float:
        """GiB that a rank may hold beyond the sum over components."""
        first = COLUMNS.index("state")
        more = self.counted - self.values[:, first : first + 4]
        return float(self._largest(more[:, 0] + self.values[:, -1]).sum() + more[:, 3].max(initial=0.0))

    def _largest(self, values: Any) -> Any:
        return np.maximum.reduceat(values, begins(self.component))

    def undominated(self, overlap: Overlap, *, piped: bool, all_fit: bool, wrapped: bool = False) -> Any:
        """Indices of options that no other option of the same component and layout can replace in every plan without
        loss; with ``all_fit`` memory, without loss of time.

        With ``overlap`` an option with more synchronisation may gain what hides it, and one with more of it, or with a
        longer window, may have a longer last backward. ``piped`` says that a microbatch's time may be hidden behind
        other stages while work once per step is not, and that others wait for the last backward, so all three count.
        ``wrapped`` is that of :func:`formulate`.
        """

        def column(name: str) -> Any:
            return self.values[:, COLUMNS.index(name)]

        group = self.component * len(self._menu.layouts) + self.layout
        if wrapped:
            wrapping = self._menu.wrapping[self.which]
            group = group * (wrapping.max() + 2) + wrapping + 1
        saving, sp, sc = overlap.saving, overlap.compute_slowdown, overlap.communication_slowdown
        hidden, window = [0.0], sp * column("window")
        if saving >= 0:  # no synchronisation may be hidden, either part of it, or both
            prompt, late = sc * column("prompt"), sc * column("late")
            hidden += [prompt, late, prompt + late]
        criteria = [column("forward"), column("backward"), -window, *(self.work - saving * h for h in hidden)]
        if piped:
            once, longer = column("once") + column("prompt") + column("late"), 1 - 1 / sp if saving >= 0 else 0.0
            criteria += [once - saving * h for h in hidden]
            criteria += [column("bucket") + longer * h for h in ((*hidden, window) if longer else (0.0,))]
        if not all_fit:
            criteria += [column(name) for name in ("state", "activations", "gradients", "transient")]
            criteria += [column("state") - column("added")] if piped else []
        return np.sort(efficient(np.stack(criteria, axis=1), group))

    def rows(self, indices: Any, numbers: dict[Layout, int]) -> tuple[Row, ...]:
        """The options ``indices``, one :class:`Row` for each component."""
        number = np.array([numbers.get(x, -1) for x in self._menu.layouts])
        rows = []
        for group in np.split(indices, np.flatnonzero(np.diff(self.component[indices])) + 1):
            ways = [self._menu.ways[w] for w in self.which[group].tolist()]
            rows.append(Row(self.values[group], self.work[group], number[self.layout[group]], ways))
        return tuple(rows)


def _most(options: _Options, joints: Iterable[Joints | Sides], in_flight: int) -> float:
    """GiB above which no choice peaks, however the components are cut into stages."""
    total = float((options.most("state") + options.most("gradients") + in_flight * options.most("activations")).sum())
    moving, passing = float(options.most("transient").max()), 0.0
    for joint in joints:
        state, activations, transient = (joint.figures[JOINT.index(x)] for x in ("state", "activations", "transient"))
        total += float((state + in_flight * activations).max(initial=0.0))
        passing = max(passing, float(transient.max(initial=0.0)))
    return total + moving + 3 * passing


def _edges(
    pricer: Pricer, layouts: tuple[Layout, ...], layouts_of: list[tuple[int, ...]], numbers: dict[Layout, int]
) -> tuple[Joints, ...]:  # fmt: skip
    """Boundaries between all of the ``layouts`` that neighbours have. Equal ones, between repeated blocks, are one
    object."""
    keys = [(layouts_of[i - 1], layouts_of[i], pricer.states.fronts[i]) for i in range(1, len(layouts_of))]
    joints: dict[tuple[object, ...], Joints] = {}
    for pair in dict.fromkeys(key[:2] for key in keys):
        first = {key: i for i, key in reversed(list(enumerate(keys, 1))) if key[:2] == pair}
        sources, targets = (tuple(layouts[k] for k in row) for row in pair)
        figures = _figures(pricer, pricer.edges.boundaries(list(first.values()), sources, targets))
        ends = [numbers[a] for a in sources], [numbers[b] for b in targets]
        joints |= {key: Joints(*ends, x) for key, x in zip(first, figures, strict=True)}
    return tuple(joints[key] for key in keys)


def _figures(pricer: Pricer, columns: Any) -> Any:
    """Numbers of boundaries in ms and GiB: component x figure (``JOINT``) x pair or layout. ``columns`` are those of
    :class:`asa.cost.boundary.edges.Edges`."""
    forward, backward, once = columns[:, :3].swapaxes(0, 1)
    cost = pricer.num_microbatches * (forward + backward) + once
    return np.concatenate([cost[:, None] * MS, columns[:, :3] * MS, columns[:, 3:6] / GIB], axis=1)


def _ends(
    pricer: Pricer, layouts: tuple[Layout, ...], layouts_of: list[tuple[int, ...]], numbers: dict[Layout, int], *,
    inlet: bool, whole: bool,
) -> tuple[Sides, ...]:  # fmt: skip
    """Costs of beginning (or ending) a stage with each component, in those of the ``layouts`` that it may have; for a
    single stage only at its two ends."""
    all_, n = pricer.edges, len(layouts_of)
    price = all_.inlets if inlet else all_.outlets
    indices = range(n) if not whole else [0] if inlet else [n - 1]
    ends = [Sides((), np.zeros((len(JOINT), 0)))] * n
    for i, figures in zip(indices, _figures(pricer, price(indices, layouts)), strict=True):
        ends[i] = Sides([numbers[layouts[k]] for k in layouts_of[i]], figures[:, list(layouts_of[i])])
    return tuple(ends)
