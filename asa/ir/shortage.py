"""Record of a shortage of memory on a rank, with what is known for planning again."""

from __future__ import annotations

import errno
import re
from typing import Literal

from asa.ir.codec import later, noun
from asa.ir.plan import Plan

_SIGNS = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|_ALLOC_FAILED|Cannot allocate memory", re.IGNORECASE
)
_UNITS = {"": 1, "byte": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"(?:tried to allocate|allocate) (\d+(?:\.\d+)?) ?(bytes|byte|KiB|MiB|GiB)", re.IGNORECASE)


@noun
class Shortage:
    """Shortage of memory on process ``rank`` of a run under ``plan``, in its optimizer step ``step``, counted from 0.

    Bytes are those of the model and its training, without what the process had before. They are None where they are not
    known.

    Attributes:
        cause: ``exhausted`` if an allocation failed; ``killed`` if the operating system killed the process for its
            memory; ``tight`` if the ranks agreed between two steps that one of them was about to run out.
        used_bytes: the most that the rank had: on CUDA the allocator's active peak, on a CPU the memory of the process.
        asked_bytes: the allocation that failed on top of that.
        room_bytes: the most that the rank could have had.
        free_bytes: what all ranks of one host can have between them, including what each of their processes has without
            a model: the free memory after they had ended. None also where ranks share no memory.
        processes: the process that ran each rank of the plan; empty if they are in order, or not known.
    """

    plan: Plan
    rank: int
    step: int
    cause: Literal["exhausted", "killed", "tight"]
    used_bytes: int | None
    asked_bytes: int
    room_bytes: int | None
    free_bytes: int | None = later()
    processes: tuple[int, ...] = later(())

    @property
    def plan_rank(self) -> int:
        """Rank of the plan that process ``rank`` ran; if that is none or not known, the one that needs most memory."""
        predicted = self.plan.prediction.memory_bytes_per_rank
        order = self.processes if len(self.processes) == len(predicted) else range(len(predicted))
        return order.index(self.rank) if self.rank in order else predicted.index(max(predicted))

    @property
    def promised_bytes(self) -> int:
        """Bytes that the plan predicted for this rank."""
        return self.plan.prediction.memory_bytes_per_rank[self.plan_rank]


def is_exhaustion(error: BaseException) -> bool:
    """Whether ``error`` means that memory of the device or the host ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


def asked(error: BaseException) -> int:
    """Bytes of the allocation that failed; 0 if the message does not say.

    >>> asked(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    2147483648
    """
    match = _ASKED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0
