"""Input and output of the joint search: numbers in ms and GiB, without arithmetic of clusters.

A pipeline plan cuts the chain of components into intervals. Stage s runs its components on ``widths[s]`` ranks, which
are assigned in order from rank 0; it begins at rank ``sum(widths[:s])``. All stages compute the same number of
microbatches, in the order of one schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

from asa.cost.pipeline import StageTimes, makespan
from asa.cost.step import side_by_side
from asa.interfaces.schedule import Schedule
from asa.ir.layout import Layout
from asa.planner.stage.problem import Chain, Choice, Problem


class Pipelines(Protocol):
    """The data behind all pipeline plans. Prices do not depend on the number of ranks that a plan leaves unused."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""

    @property
    def gpus(self) -> int:
        """Number of ranks; a plan may use fewer."""

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Schedules by name."""

    def widths(self) -> tuple[int, ...]:
        """Stage widths in the space."""

    def microbatches(self) -> tuple[int, ...]:
        """Numbers of microbatches in the space."""

    def compute(self, width: int, num_microbatches: int) -> Sequence[float] | None:
        """Least ms of forward and backward of one microbatch for each component, without communication; infinite where
        it cannot run; None where no component can. It must be quick."""

    def ends(self, width: int, num_microbatches: int) -> tuple[Sequence[float], Sequence[float]] | None:
        """Least ms of one microbatch, forward and backward, for a stage that begins with each component, and for one
        that ends with it; None where no bound is known. It must be quick."""

    def whole(self, width: int, num_microbatches: int) -> Any | None:
        """Lower bounds in ms for each component, array (2, row, component): of a whole step, and of a step with one of
        its microbatches; both with once-per-step work. A stage takes at least the greatest sum over the rows. None
        where no bound is known."""

    def chain(self, width: int, num_microbatches: int) -> Chain | None:
        """The chain of stages of that width; None where some component cannot run. It is asked for once."""

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage of that width may begin at that rank."""

    def hop(self, offset: int) -> int:
        """A number for the links in front of a stage that begins at rank ``offset``; equal numbers for equal transfer
        times."""

    def crossing(self, cut: int) -> float:
        """A number for the cut in front of component ``cut``, such as bytes per sample; equal where transfers take
        equal times. Negative: no stage may begin there."""

    def transfers(
        self, cuts: Sequence[int], num_microbatches: int, source: Layout, target: Layout, offset: int
    ) -> list[tuple[float, float]]:
        """Ms of one microbatch over each of ``cuts`` to a stage that begins at rank ``offset``, forward and backward.

        Only the widths and data degrees of the layouts count.
        """

    def fits(self, skeleton: Skeleton, choices: Sequence[Choice]) -> bool:
        """Whether a plan that fits by its chains also fits by its full price."""


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

    def stops(self, components: int) -> tuple[int, ...]:
        """For every stage the component behind its last one."""
        return (*self.starts[1:], components)


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
    counts: dict[str, int] = field(default_factory=dict)


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


def value_of(pipelines: Pipelines, skeleton: Skeleton, choices: Sequence[Choice]) -> float:
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
