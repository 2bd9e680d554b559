"""A timeline in Chrome's trace format, which Perfetto opens: one process a rank, one thread a stream.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format); times in us.
"""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from asa.errors import UsageError
from asa.simulator.timeline import Timeline

_THREADS = {"compute": 0, "communication": 1}
_MOST_RANKS = 64


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace document; of more than 64 ranks, which all do the same, the first 64."""
    events: list[dict[str, Any]] = []
    for rank in range(min(timeline.ranks, _MOST_RANKS)):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} (planned)"}})
        for stream, thread in _THREADS.items():
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": stream}})
        for e in timeline.events:
            events.append(
                {
                    "name": f"{e.name} {e.kind}",
                    "cat": e.kind,
                    "ph": "X",
                    "ts": e.start_s * 1e6,
                    "dur": (e.end_s - e.start_s) * 1e6,
                    "pid": rank,
                    "tid": _THREADS[e.stream],
                    "args": {"microbatch": e.microbatch},
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": timeline.model, "step_time_s": timeline.step_time_s},
    }


def save_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace to ``path``, compressed where that ends in ``.gz``.

    Raises:
        UsageError: it cannot be written there.
    """
    text = json.dumps(chrome_trace(timeline), allow_nan=False).encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write the trace to {path}: {error.strerror or error}") from None
