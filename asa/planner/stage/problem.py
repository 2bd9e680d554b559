"""The numeric problem inside a stage: numbers only, without bandwidths, strategies or torch.

A component has exactly one *configuration*. Neighbours see only each other's *layout* (data and tensor degree); which
data strategy keeps the state, checkpointing and offload are private to a component. So an edge needs one cost per pair
of layouts: 10 x 10 at width 8, and not 26 x 26. Times are in ms and memory in GiB, so that the tolerances of solvers
mean something.

    minimise   sum work + sum edge - saving * tau
    tau    <=  sp * sum_{l<k} window_l  +  sc * sum_{l: released after k} sync_l           for every k
    memory     sum state + sum_{l<=k} activations_l + sum_{l>=k} gradients_l + transient_k <= capacity   for every k

``work`` contains all of a component's own time, also its gradient synchronisation. tau is the time in ms during which
backward and gradient synchronisation overlap (:mod:`asa.cost.step` derives it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, overload

import numpy as np

from asa.cost.way import Way
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree

MS = 1e3
"""Milliseconds per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One way to run one component. Times are in ms, memory in GiB.

    ``forward`` and ``backward`` are of one microbatch, including communication for which computation waits. ``once`` is
    paid once per step, in addition to the gradient synchronisation ``prompt + late``, which is released with the
    component and later. ``work`` is all of a step: ``m (forward + backward) + once + prompt + late``. ``window`` is the
    backward compute of the last microbatch, behind which the synchronisation of others can hide; ``bucket`` is the part
    of ``once`` in it. ``activations`` are of one microbatch. ``added`` is the part of the state that is gradients of
    several microbatches.

    Memory is the least that the component holds, whatever its neighbours run (:mod:`asa.cost.memory.together`).
    """

    layout: int
    data: DataDegree
    tensor: TensorDegree
    work: float
    window: float
    prompt: float
    late: float
    state: float
    activations: float
    gradients: float
    transient: float
    checkpoint: bool = False
    offload: bool = False
    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    bucket: float = 0.0
    added: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The cost in ms of changing from one layout to another, and the GiB that it holds. ``cost`` is all of a step, ``m
    (forward + backward) + once``; ``state`` is held all the time."""

    cost: float
    activations: float = 0.0
    transient: float = 0.0
    state: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StageNumbers:
    """Components on stages of ``width`` ranks. ``edges[i][a, b]`` joins layout a of component i to layout b of i + 1.

    ``release[i]`` is the component after whose backward the late part of component i's synchronisation is released: its
    own, the one before it, or that of the one before it (one bucket is open at a time). ``saving`` is the number of ms
    that a ms of overlap saves; ``sp`` and ``sc`` are how much the two streams slow each other down. ``capacity`` is in
    GiB. ``over`` is the number of GiB that a rank may hold beyond the sum over components.
    """

    width: int
    num_microbatches: int
    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    configs: tuple[Sequence[Config], ...]
    edges: tuple[Mapping[tuple[int, int], Edge], ...]
    release: tuple[int, ...]
    saving: float
    sp: float
    sc: float
    capacity: float
    over: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem(StageNumbers):
    """One stage with all its components. Its ends are part of its first and its last component."""

    def __post_init__(self) -> None:
        n = len(self.names)
        if not n or not len(self.configs) == len(self.release) == len(self.edges) + 1 == n:
            raise ValueError("configs and releases come one per component, edges one less")
        if any(r not in (i, i - 1, self.release[max(0, i - 1)]) or r < 0 for i, r in enumerate(self.release)):
            raise ValueError("buckets are filled one after the other: releases (i), (i - 1), or that of i - 1")
        if self.saving < 0:
            raise ValueError("a negative saving is charged in the work of the configurations")

    def __len__(self) -> int:
        return len(self.names)

    def without_memory_limit(self) -> Problem:
        """A copy without the memory limit."""
        return replace(self, capacity=float("inf"))


Choice = tuple[int, ...]
"""One index into ``configs`` per component."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A solver's answer: ``choice`` (None if nothing fits), its ``value`` and the proved ``bound``, both in ms."""

    choice: Choice | None
    value: float
    bound: float
    solver: str

    @property
    def proved(self) -> bool:
        """Whether the solver has closed the gap (to one part in a million), or found that nothing fits at all."""
        if self.choice is None:
            return self.bound == float("inf")
        return self.value - self.bound <= 1e-6 * max(1.0, abs(self.value))


@dataclass(frozen=True, kw_only=True)
class Chain(StageNumbers):
    """All components, from which stages over any interval can be cut.

    ``inlets[i]`` is, for each layout, the cost of beginning a stage with component i (for the first: of reading the
    data). ``outlets[i]`` is that of ending one after it (for the last: of the loss). Transfers between stages are not
    included.
    """

    inlets: tuple[Mapping[int, Edge], ...]
    outlets: tuple[Mapping[int, Edge], ...]

    def stage(self, start: int, stop: int, in_flight: int = 1) -> Problem:
        """Components ``start`` to ``stop - 1`` as one stage that holds the activations of ``in_flight`` microbatches.

        Choices in the result index into ``configs[start:stop]``.
        """
        return self._cut(start, [list(row) for row in self.configs[start:stop]], in_flight)

    def chosen(self, start: int, choice: Choice, in_flight: int = 1) -> Problem:
        """A stage from component ``start`` on, in which each component has only the configuration of ``choice``."""
        return self._cut(start, [[self.configs[start + k][c]] for k, c in enumerate(choice)], in_flight)

    def _cut(self, start: int, picked: list[list[Config]], in_flight: int) -> Problem:
        stop, more = start + len(picked), in_flight - 1
        ahead = all_ahead(self.num_microbatches, in_flight)
        rows = [[_held(c, in_flight, ahead=ahead) for c in row] for row in picked]
        inlets = self.inlets[start]
        if ahead and start:
            inlets = {k: replace(e, state=0.0) for k, e in inlets.items()}
        rows[0] = [_joined(c, inlets[c.layout], in_flight) for c in rows[0]]
        rows[-1] = [_joined(c, self.outlets[stop - 1][c.layout], in_flight) for c in rows[-1]]
        edges = self.edges[start : stop - 1]
        if all(len(row) == 1 for row in rows):
            pairs = [(a[0].layout, b[0].layout) for a, b in pairwise(rows)]
            edges = tuple({ab: e[ab]} for ab, e in zip(pairs, edges, strict=True))
        if more:
            edges = tuple(
                {ab: replace(e, state=(0.0 if ahead else e.state) + more * e.activations) for ab, e in found.items()}
                for found in edges
            )
        shared = {f.name: getattr(self, f.name) for f in fields(StageNumbers)}
        release = tuple(max(r, start) - start for r in self.release[start:stop])
        shared |= {"names": self.names[start:stop], "configs": tuple(map(tuple, rows)), "edges": edges}
        return Problem(**shared | {"release": release})


def all_ahead(num_microbatches: int, in_flight: int) -> bool:
    """Whether all microbatches have run forward in a stage before the first one runs backward.

    The stage's gradients are then allocated during its backward, like those of a single microbatch, and what boundaries
    keep from one microbatch to the next is not there yet. Memory after the first backward, without its activations, is
    hardly ever more, and never less than this assumes.

    >>> all_ahead(4, 4), all_ahead(4, 3), all_ahead(1, 1)
    (True, False, False)
    """
    return 1 < num_microbatches <= in_flight


def _held(config: Config, in_flight: int, *, ahead: bool) -> Config:
    """The configuration, with the activations of all microbatches in flight but the current one counted as state. If
    all are ``ahead``, gradients that they add up do not exist before."""
    if in_flight == 1:
        return config
    more = (in_flight - 1) * config.activations
    if ahead:
        return replace(config, state=config.state - config.added + more, gradients=config.added, added=0.0)
    return replace(config, state=config.state + more)


def _joined(config: Config, end: Edge, in_flight: int) -> Config:
    """The configuration with an end of the stage added."""
    return replace(
        config,
        work=config.work + end.cost,
        forward=config.forward + end.forward,
        backward=config.backward + end.backward,
        once=config.once + end.once,
        state=config.state + end.state + (in_flight - 1) * end.activations,
        activations=config.activations + end.activations,
        transient=config.transient + end.transient,
    )


COLUMNS = ("forward", "backward", "bucket", "once", "prompt", "late", "window", "state", "activations", "gradients",
           "transient", "added")  # fmt: skip
"""Columns of :attr:`Row.values`, named as in :class:`asa.planner.stage.problem.Config`."""

JOINT = ("cost", "forward", "backward", "once", "state", "activations", "transient")
"""Columns of :attr:`Joints.figures` and :attr:`Sides.figures`, named as in :class:`asa.planner.stage.problem.Edge`."""
_JOINT = attrgetter(*JOINT)


class Row(Sequence[Config]):
    """The configurations of one component. ``values`` is configuration x column. ``layout`` and ``work`` have an entry
    for each configuration; ``ways`` are the ways for which they stand."""

    def __init__(self, values: Any, work: Any, layout: Any, ways: Sequence[Way]) -> None:
        self.values, self.work, self.layout, self.ways = values, work, layout, ways
        self._made: dict[int, Config] = {}

    def __len__(self) -> int:
        return len(self.ways)

    @overload
    def __getitem__(self, index: int) -> Config: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Config, ...]: ...
    def __getitem__(self, index: int | slice) -> Config | tuple[Config, ...]:
        if isinstance(index, slice):
            return tuple(self[k] for k in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._made:
            way = self.ways[index]
            self._made[index] = Config(
                layout=int(self.layout[index]),
                data=way.data,
                tensor=way.tensor,
                checkpoint=way.checkpoint,
                offload=way.offload,
                work=float(self.work[index]),
                **dict(zip(COLUMNS, self.values[index].tolist(), strict=True)),
            )
        return self._made[index]


def column(row: Sequence[Config], name: str) -> Any:
    """The field ``name`` of each configuration of a component, as an array."""
    if not isinstance(row, Row):
        return np.array([getattr(c, name) for c in row])
    return row.values[:, COLUMNS.index(name)] if name in COLUMNS else getattr(row, name)


class Sides(Mapping[int, Edge]):
    """Costs of beginning, or of ending, a stage in each of ``layouts`` (by number). ``figures`` is column x layout."""

    def __init__(self, layouts: Sequence[int], figures: Any) -> None:
        self.layouts, self.figures = layouts, figures

    def __len__(self) -> int:
        return len(self.layouts)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layouts)

    def __getitem__(self, layout: int) -> Edge:
        if layout not in self.layouts:
            raise KeyError(layout)
        return Edge(**dict(zip(JOINT, self.figures[:, self.layouts.index(layout)].tolist(), strict=True)))


class Joints(Mapping[tuple[int, int], Edge]):
    """Boundaries from each of ``sources`` to each of ``targets`` (layouts by number). ``source`` and ``target`` have an
    entry for each boundary; ``figures`` is column x boundary."""

    def __init__(self, sources: Sequence[int], targets: Sequence[int], figures: Any) -> None:
        self.source = np.repeat(np.array(sources, dtype=np.int64), len(targets))
        self.target = np.tile(np.array(targets, dtype=np.int64), len(sources))
        self.figures = figures
        self._places: dict[tuple[int, int], int] = {}

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The index of each boundary in ``figures``."""
        if not self._places:
            pairs = zip(self.source.tolist(), self.target.tolist(), strict=True)
            self._places = {pair: k for k, pair in enumerate(pairs)}
        return self._places

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.places)

    def __getitem__(self, pair: tuple[int, int]) -> Edge:
        return Edge(**dict(zip(JOINT, self.figures[:, self.places[pair]].tolist(), strict=True)))


def tabulated(costs: Mapping[Any, Edge]) -> tuple[tuple[Any, ...], Any]:
    """Layouts of boundaries (sources, targets) or of ends (one array), and their figures: column (:data:`JOINT`) x
    entry. There must be one at least."""
    if isinstance(costs, Joints):
        return (costs.source, costs.target), costs.figures
    if isinstance(costs, Sides):
        return (list(costs.layouts),), costs.figures
    keys = np.array(list(costs), dtype=np.int64).reshape(len(costs), -1)
    return tuple(keys.T), np.array([_JOINT(e) for e in costs.values()]).T
