"""Common form of planned and measured timelines: one process per rank, one thread per stream."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

Stream = Literal["compute", "communication", "sending on", "sending back"]

THREADS: dict[Stream, int] = {"compute": 0, "communication": 1, "sending on": 2, "sending back": 3}
"""Thread number of each stream."""


def process(
    rank: int, stage: int, num_stages: int, what: Literal["planned", "measured"], used: Collection[str]
) -> list[dict[str, Any]]:
    """Events of Chrome's trace format that name a rank's process and the threads of its streams ``used``."""
    title = f"rank {rank} ({what})" if num_stages < 2 else f"rank {rank}, stage {stage} ({what})"
    named: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": title}}]
    for stream, thread in THREADS.items():
        if stream in used or thread < 2:
            named.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": stream}})
    return named


def piece(
    name: str, kind: str, stream: Stream, rank: int, start_s: float, end_s: float, microbatch: int | None
) -> dict[str, Any]:
    """An event of Chrome's trace format for a piece of work."""
    return {
        "name": f"{name} {kind}",
        "cat": kind,
        "ph": "X",
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "pid": rank,
        "tid": THREADS[stream],
        "args": {} if microbatch is None else {"microbatch": microbatch},
    }
