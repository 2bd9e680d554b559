"""Where a rank stands in a plan: its stage, its place among the stage's ranks, the components they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asa.ir.layout import Layout
from asa.ir.plan import Assignment, Plan
from asa.ir.transfer import Hop, hops


@dataclass(frozen=True, kw_only=True)
class Position:
    """``place`` counts from 0 within ``ranks``: what layouts call a rank. ``components`` are indices into the plan's.

    ``arriving`` and ``leaving`` are the hand-overs from the stage before and to the one behind.
    """

    stage: int
    ranks: tuple[int, ...]
    place: int
    components: range
    layouts: tuple[Layout, ...]
    arriving: Hop | None
    leaving: Hop | None

    @staticmethod
    def of(plan: Plan, rank: int) -> Position:
        """The position of ``rank``, which takes part in ``plan``."""
        stage = next(i for i, s in enumerate(plan.stages) if rank in s.ranks)
        ranks = plan.stages[stage].ranks
        indices = [i for i, c in enumerate(plan.components) if c.stage == stage]
        found = hops(plan)
        return Position(
            stage=stage,
            ranks=ranks,
            place=ranks.index(rank),
            components=range(indices[0], indices[-1] + 1),
            layouts=plan.layouts()[indices[0] : indices[-1] + 1],
            arriving=found[stage - 1] if stage else None,
            leaving=found[stage] if stage + 1 < len(plan.stages) else None,
        )

    @staticmethod
    def nowhere() -> Position:
        """That of a process that runs no rank of the plan: in no stage, with nothing to compute."""
        return Position(stage=-1, ranks=(), place=-1, components=range(0), layouts=(), arriving=None, leaving=None)

    @property
    def idle(self) -> bool:
        """Whether it is in no stage."""
        return self.stage < 0

    def assignments(self, plan: Plan) -> tuple[Assignment, ...]:
        """The stage's part of ``plan.components``."""
        return plan.components[self.components.start : self.components.stop]

    def world(self, places: Sequence[int]) -> tuple[int, ...]:
        """Ranks of the plan at ``places`` of the stage."""
        return tuple(self.ranks[p] for p in places)
