"""Planned and measured timelines in one file: Perfetto shows every rank twice, planned above measured."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asa.errors import InvalidInputError
from asa.ir import codec
from asa.reading import read_bytes
from asa.simulator import Timeline, chrome_trace


def together(planned: Timeline, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document in Chrome's trace format; processes keep their names, and are sorted by rank."""
    plan = chrome_trace(planned)
    events: list[dict[str, Any]] = []
    for side, documents in enumerate(([plan], measured)):
        for event in (e for d in documents for e in d["traceEvents"]):
            pid = 2 * event["pid"] + side
            events.append({**event, "pid": pid})
            if event.get("name") == "process_name":
                events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": plan["otherData"]}


def load(path: Path) -> dict[str, Any]:
    """The document that :func:`save_together` wrote.

    Raises:
        InvalidInputError: it cannot be read.
    """
    try:
        document = json.loads(gzip.decompress(read_bytes(path)))
        if isinstance(document["traceEvents"], list):
            return dict(document)
    except (ValueError, EOFError, KeyError, TypeError, OSError, zlib.error):
        pass
    raise InvalidInputError(f"{path} is not a trace of `asa train --trace`; delete it, or run that again")


def save_together(planned: Timeline, measured: Sequence[Path], path: Path) -> None:
    """Write :func:`together` of the ranks' own traces to ``path``, compressed."""
    documents = [json.loads(gzip.decompress(read_bytes(p))) for p in measured]
    text = json.dumps(together(planned, documents), allow_nan=False).encode()
    codec.write(gzip.compress(text, mtime=0), path)
