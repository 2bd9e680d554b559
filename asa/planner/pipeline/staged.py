"""The space of pipeline plans as numbers in ms and GiB, computed on demand, and the results of searching it.

A pipeline plan cuts the chain of components into intervals. Stage s runs its components on ``widths[s]`` ranks, which
are assigned in order from rank 0; it begins at rank ``sum(widths[:s])``. All stages compute the same number of
microbatches, in the order of one schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from asa.cost.pipeline import StageTimes, makespan
from asa.cost.pricing import Way
from asa.cost.step import side_by_side
from asa.interfaces.schedule import Schedule
from asa.ir.layout import Layout
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed
from asa.planner.stage.floor import LimitedStages, limited_stages
from asa.planner.stage.formulate import Formulation, formulate
from asa.planner.stage.problem import MS, Chain, Choice, Problem

NEVER_MS = 1e9
"""Ms of a transfer where no stage may begin: never optimal, but finite, so that bounds can be subtracted."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A pipeline plan without the choices inside its stages: stage s begins with component ``starts[s]``."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    num_microbatches: int
    schedule: str

    def offsets(self) -> tuple[int, ...]:
        """First rank of every stage."""
        return (0, *accumulate(self.widths[:-1]))


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Result of the search, in ms.

    ``choices[s]`` indexes into ``chain(widths[s], m).configs[start:stop]``. ``skeleton`` is None where no plan that
    fits is faster than the given incumbent. ``bound``: lower bound on all pipeline plans, at most the incumbent.
    ``curve``: (seconds, best, bound) over time, the given incumbent included.
    """

    skeleton: Skeleton | None
    choices: tuple[Choice, ...]
    value: float
    bound: float
    curve: tuple[tuple[float, float, float], ...] = ()


class StagedSpace:
    """Stages of every width and number of microbatches in one space. Prices assume that all devices are busy.

    ``every``: configurations that only save memory are offered even where memory cannot bind, and memory is counted as
    :func:`asa.planner.stage.formulate.formulate` says.
    """

    def __init__(self, prices: Prices, allowed: Allowed, *, every: bool = False) -> None:
        space = prices.space
        self._prices = prices
        self._allowed, self._every = allowed, every
        self.likely_tight = False
        """Whether memory is likely to bind; it sets the order in which configurations are priced and bounded."""
        self._formulations: dict[tuple[int, int], Formulation | None] = {}
        self._computes: dict[tuple[int, int], list[float]] = {}
        self._several: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        self.names = tuple(c.name for c in space.profile.graph.components)
        self.global_batch = space.request.global_batch
        self.gpus = self._busy = space.request.gpus
        self.schedules: dict[str, Schedule] = space.schedules

    def first(self, offset: int) -> int:
        """The rank at an offset; :mod:`asa.planner.pipeline.kinds` counts offsets differently."""
        return offset

    def width(self, number: int) -> int:
        """Number of devices of a stage; :mod:`asa.planner.pipeline.kinds` counts widths differently."""
        return number

    def example(self, width: int) -> int:
        """First rank of an example stage of that width; all such stages have equal devices."""
        return 0

    def widths(self) -> tuple[int, ...]:
        """Stage widths, ascending; at least one device is left for another stage."""
        return tuple(sorted(w for w in self._prices.space.several(self.gpus) if w < self.gpus))

    def microbatches(self) -> tuple[int, ...]:
        """Numbers of microbatches in the space, up to the largest for pipelines."""
        return tuple(m for m in self._prices.space.microbatches() if m <= MOST_IN_A_PIPELINE)

    def compute(self, width: int, num_microbatches: int) -> list[float]:
        """Least ms of forward and backward of one microbatch for each component; infinite where it cannot run."""
        key = (width, num_microbatches)
        if key not in self._computes:
            seconds = self._prices.compute(self.width(width), num_microbatches, self._busy, self.example(width))
            self._computes[key] = [x * MS for x in seconds]
        return self._computes[key]

    def limited(self, width: int, num_microbatches: int, in_flight: Sequence[int]) -> list[LimitedStages]:
        """Bounds on stages with the memory limit (:func:`asa.planner.stage.floor.limited_stages`)."""
        ranks = range(self.example(width), self.example(width) + self.width(width))
        return limited_stages(
            self._prices, ranks, num_microbatches, self._busy, self._allowed, in_flight, self.likely_tight
        )

    def formulation(self, width: int, num_microbatches: int) -> Formulation | None:
        """The formulation of stages of that width; None where some component cannot run in one."""
        key = (width, num_microbatches)
        if key not in self._formulations:
            made = formulate(
                self._prices, self.width(width), num_microbatches, self._allowed, busy=self._busy,
                first=self.example(width), every=self._every, likely_tight=self.likely_tight,
            )  # fmt: skip
            if made is not None and made.chain.width != width:
                made = Formulation(replace(made.chain, width=width), made.ways)
            self._formulations[key] = made
        return self._formulations[key]

    def chain(self, width: int, num_microbatches: int) -> Chain | None:
        """The chain of :meth:`formulation`."""
        formulation = self.formulation(width, num_microbatches)
        return None if formulation is None else formulation.chain

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage may begin at that rank: inside a node, or on whole nodes."""
        return self._prices.space.placed(offset, width)

    def hop(self, offset: int) -> int:
        """Level of the link in front of that rank."""
        return self._prices.space.cluster.hop(offset)

    def crossing(self, cut: int) -> float:
        """Bytes per sample in front of component ``cut``; -1 where no stage may begin."""
        if not self._prices.space.profile.graph.cuttable(cut):
            return -1.0
        return float(self._prices.space.profile.graph.components[cut - 1].output_bytes_per_sample)

    def transfers(
        self, cuts: Sequence[int], num_microbatches: int, source: Layout, target: Layout, offset: int
    ) -> list[tuple[float, float]]:
        """Ms of one microbatch over each of ``cuts``, forward and backward; the later stage begins at ``offset``."""
        some = tuple(c for c in cuts if self.crossing(c) >= 0)
        key = (some, num_microbatches, source.width, source.data, target.width, target.data, self.hop(offset))
        if key not in self._several:
            pricer = self._prices.pricer(source.width, num_microbatches, self._busy)
            sent = pricer.handovers(some, source, target, self.first(offset))
            times = [(on * MS, back * MS) for on, back in sent]
            # Between the same layouts in reverse, the two directions swap.
            self._several[*key[:2], *key[4:6], *key[2:4], key[6]] = [(back, on) for on, back in times]
            self._several[key] = times
        by_size = dict(zip(some, self._several[key], strict=True))
        return [by_size.get(c, (NEVER_MS, NEVER_MS)) for c in cuts]

    def fits(self, skeleton: Skeleton, choices: Sequence[Choice]) -> bool:
        """Whether every rank of such a pipeline has enough memory."""
        return self._prices.fits(self.candidate(skeleton, choices))

    def candidate(self, skeleton: Skeleton, choices: Sequence[Choice]) -> Candidate:
        """The candidate for these choices in a pipeline."""
        ways: list[Way] = []
        for start, width, choice in zip(skeleton.starts, skeleton.widths, choices, strict=True):
            formulation = self.formulation(width, skeleton.num_microbatches)
            assert formulation is not None
            ways += formulation.picked(start, choice)
        return Candidate(
            origin="asa",
            widths=tuple(self.width(w) for w in skeleton.widths),
            starts=skeleton.starts,
            schedule=skeleton.schedule,  # type: ignore[arg-type]
            num_microbatches=skeleton.num_microbatches,
            ways=tuple(ways),
        )


def stage_times(problem: Problem, choice: Choice) -> StageTimes:
    """Times in ms of one stage under ``choice`` for the clock of a pipeline (formulas: :mod:`asa.cost.step`)."""
    m = problem.num_microbatches
    picked = [problem.configs[i][c] for i, c in enumerate(choice)]
    joints = [problem.edges[i][a.layout, b.layout] for i, (a, b) in enumerate(pairwise(picked))]
    forward = sum(x.forward for x in picked) + sum(x.forward for x in joints)
    backward = sum(x.backward for x in picked) + sum(x.backward for x in joints)
    both = 0.0
    if problem.saving > 0:
        prompt, late = [c.prompt for c in picked], [c.late for c in picked]
        both = side_by_side([c.window for c in picked], prompt, late, problem.release, problem.sp, problem.sc)
    extra = sum(c.bucket for c in picked) + both * (1 - 1 / problem.sp)
    total = sum(c.work for c in picked) + sum(e.cost for e in joints) - problem.saving * both
    return StageTimes(
        forward=forward,
        backward=backward,
        last_backward_extra=extra,
        after=max(0.0, total - m * (forward + backward) - extra),
    )


def value_of(pipelines: StagedSpace, skeleton: Skeleton, choices: Sequence[Choice]) -> float:
    """Ms of a step of that plan, by the clock of a pipeline; infinite where some component cannot run."""
    m, schedule = skeleton.num_microbatches, pipelines.schedules[skeleton.schedule]
    times, ends = [], []
    for width, start, choice in zip(skeleton.widths, skeleton.starts, choices, strict=True):
        chain = pipelines.chain(width, m)
        if chain is None:
            return float("inf")
        stage = chain.chosen(start, choice)
        times.append(stage_times(stage, (0,) * len(choice)))
        ends.append((chain.layouts[stage.configs[0][0].layout], chain.layouts[stage.configs[-1][0].layout]))
    transfers = [
        pipelines.transfers((skeleton.starts[s],), m, ends[s - 1][1], ends[s][0], offset)[0]
        for s, offset in enumerate(skeleton.offsets())
        if s
    ]
    return makespan(times, transfers, schedule, m)
