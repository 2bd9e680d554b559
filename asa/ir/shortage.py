"""Memory that ran out on a rank, or was about to: what there is to go by in planning again."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import noun
from asa.ir.plan import Plan


@noun
class Shortage:
    """Rank ``rank`` under ``plan``, in optimizer step ``step`` of the run (counted from 0).

    ``cause``: an allocation failed (``exhausted``), the operating system killed the process for its memory
    (``killed``), or the ranks agreed between two steps that one of them was about to (``tight``).

    Bytes that the model and its training take, what the process had before aside: ``used_bytes`` the most the rank had
    of them (on CUDA the allocator's active peak, on a CPU what the process held), ``asked_bytes`` what it asked for in
    vain on top, ``room_bytes`` the most it could have had. None where it is not known.
    """

    plan: Plan
    rank: int
    step: int
    cause: Literal["exhausted", "killed", "tight"]
    used_bytes: int | None
    asked_bytes: int
    room_bytes: int | None

    @property
    def promised_bytes(self) -> int:
        """What the plan predicted of this rank."""
        predicted = self.plan.prediction.memory_bytes_per_rank
        return predicted[self.rank] if self.rank < len(predicted) else max(predicted, default=0)
