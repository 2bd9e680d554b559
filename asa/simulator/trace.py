"""Timelines in Chrome's trace format, which Perfetto opens: one process per rank, one thread per stream.

Times are in microseconds. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from asa.errors import UnavailableError
from asa.ir import codec
from asa.ir.streams import piece, process
from asa.simulator.timeline import Timeline

_MOST_RANKS = 64


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace document. With more than 64 ranks it has the first rank of every stage, if there are 2 to 64 stages;
    otherwise the first 64 ranks."""
    events: list[dict[str, Any]] = []
    used = {e.stream for e in timeline.events}
    for rank in _shown(timeline):
        stage = timeline.stage_of(rank)
        events += process(rank, stage, len(timeline.stages), "planned", used)
        events += [
            piece(e.name, e.kind, e.stream, rank, e.start_s, e.end_s, e.microbatch)
            for e in timeline.events
            if e.stage == stage
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": timeline.model, "step_time_s": timeline.step_time_s},
    }


def _shown(timeline: Timeline) -> list[int]:
    if timeline.ranks <= _MOST_RANKS:
        return list(range(timeline.ranks))
    firsts = [ranks[0] for ranks in timeline.stages]
    return firsts if 1 < len(firsts) <= _MOST_RANKS else list(range(_MOST_RANKS))


def save_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace to ``path``, compressed if it ends in ``.gz``.

    Raises:
        UnavailableError: it cannot be written.
    """
    text = json.dumps(chrome_trace(timeline), allow_nan=False).encode()
    try:
        codec.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text, path)
    except OSError as error:
        raise UnavailableError(
            f"cannot write the trace to {path}: {error.strerror or error}; name another file"
        ) from None
