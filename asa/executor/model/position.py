"""Position of a rank in a plan: its stage, its index among the stage's ranks, and the components they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asa.ir.layout import Layout
from asa.ir.plan import Assignment, Plan
from asa.ir.transfer import Hop, hops


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of one rank in a plan.

    Attributes:
        ranks: the stage's ranks.
        place: index of the rank in ``ranks``; layouts call it a rank.
        components: indices into the plan's components.
        arriving, leaving: transfers from the previous stage and to the next one.
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
        transfers = hops(plan)
        return Position(
            stage=stage,
            ranks=ranks,
            place=ranks.index(rank),
            components=range(indices[0], indices[-1] + 1),
            layouts=plan.layouts()[indices[0] : indices[-1] + 1],
            arriving=transfers[stage - 1] if stage else None,
            leaving=transfers[stage] if stage + 1 < len(plan.stages) else None,
        )

    @staticmethod
    def nowhere() -> Position:
        """The position of a process that runs no rank of the plan: no stage, no components."""
        return Position(stage=-1, ranks=(), place=-1, components=range(0), layouts=(), arriving=None, leaving=None)

    @property
    def idle(self) -> bool:
        """Whether the process is in no stage."""
        return self.stage < 0

    def assignments(self, plan: Plan) -> tuple[Assignment, ...]:
        """The assignments of the stage's components, from ``plan.components``."""
        return plan.components[self.components.start : self.components.stop]

    def world(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Ranks of the plan at ``positions`` of the stage."""
        return tuple(self.ranks[p] for p in positions)
