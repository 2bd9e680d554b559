"""Errors for lack of memory: what was predicted, what is available, and what to do.

A rank that runs out of memory in the middle of a step cannot ask the others, which wait for its gradients. It reports
what it knows and ends, and :mod:`asa.executor.running.recovery` continues without it. Before that, ranks can compare
their memory between steps.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from asa.errors import ExhaustedError
from asa.instruments.memory_limits import free_on_host, fullness, tightest, used_bytes
from asa.ir import codec
from asa.ir.plan import Plan
from asa.ir.shortage import Shortage, asked, is_exhaustion
from asa.ir.units import GIB, binary

NOTE = "memory.json"
"""Name of a file in the run's folder. It contains the shortage that ended the run, for a restart."""
NEARLY = 0.97
"""Fraction of memory in use above which a run is planned again before it fails."""


@dataclass
class MemoryWatch:
    """Memory of one rank, observed from before its model is built. ``votes`` says whether ranks compare their memory
    between steps. ``awaited_bytes``: free memory of the host with which the run returns to an earlier plan, None if
    there is none."""

    rank: int
    device: torch.device
    votes: bool = False
    awaited_bytes: float | None = None
    before: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        # Memory that a process has before it holds any of the model is not part of the prediction.
        self.before = used_bytes(self.device)

    def full(self) -> float:
        """Fraction of this rank's memory in use, 0 to 1; 0 if ranks do not compare it."""
        return fullness(self.device) if self.votes else 0.0

    def enough_again(self) -> bool:
        """Whether the host has as much free memory, beside the run, as an earlier plan waits for."""
        return self.awaited_bytes is not None and (free_on_host() or 0) >= self.awaited_bytes

    def shortage(
        self, plan: Plan, step: int, processes: tuple[int, ...] = (), *, error: BaseException | None = None
    ) -> Shortage:  # fmt: skip
        """Description of the shortage that raised ``error``; with None, of memory that is nearly full. ``processes``
        run the ranks of ``plan``; by default in order."""
        requested_bytes = 0 if error is None else asked(error)
        limit = tightest(self.device, requested_bytes)
        base = 0 if limit is None else self.before.get(limit.kind, 0)
        return Shortage(
            plan=plan,
            rank=self.rank,
            step=step,
            cause="tight" if error is None else "exhausted",
            used_bytes=None if limit is None else max(0, limit.used - base),
            asked_bytes=requested_bytes,
            room_bytes=None if limit is None else max(0, limit.limit - base),
            processes=processes,
        )


class NearlyExhausted(Exception):
    """Raised on all ranks between two steps, with everything saved: a rank is about to run out of memory."""


class EnoughAgain(Exception):
    """Raised on all ranks between two steps, with everything saved: memory suffices for an earlier plan again."""


@contextmanager
def explained(
    watch: MemoryWatch, where: Callable[[], tuple[Plan, int, tuple[int, ...]]], note: Path | None = None
) -> Iterator[None]:  # fmt: skip
    """Context that turns running out of memory into one line with a remedy. ``where`` returns the current plan, the
    step, and the processes that run its ranks.

    Raises:
        ExhaustedError: memory ran out on this rank; the shortage is also written to ``note``.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_exhaustion(error):
            raise
        shortage = watch.shortage(*where(), error=error)
        traceback.clear_frames(error.__traceback__)  # frees what the step held, because the report takes memory, too
        if note is not None:
            with contextlib.suppress(OSError):
                codec.save(shortage, note)
        raise ExhaustedError(_line(shortage, watch.device), rank=watch.rank, shortage=shortage) from error


def _line(shortage: Shortage, device: torch.device) -> str:
    used, limit = shortage.used_bytes, shortage.room_bytes
    if used is None or limit is None:
        usage, remedy = "the host has no more", "plan again with a lower --memory, or with fewer --gpus here"
    else:
        usage = f"{binary(used)} were in use and {binary(shortage.asked_bytes)} asked for, of {binary(limit)}"
        remedy = f"plan again with --memory {max(0.1, 0.9 * limit / GIB):.1f}"
        if device.type != "cuda":
            remedy += ", or with fewer --gpus here"
    return (
        f"rank {shortage.rank} ran out of memory in step {shortage.step}: the plan promised "
        f"{binary(shortage.promised_bytes)}, {usage}; {remedy}, then --resume"
    )
