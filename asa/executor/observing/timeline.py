"""Timelines of real steps: forward and backward of each component, collectives and update, by the clock of one rank.

Computation is timed by the hooks of :mod:`asa.executor.observing.spans`. Collectives that computation waits for are
timed at the call (on a CPU). Concurrent ones come from torch's profiler, which records gloo's and NCCL's own work.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from asa.executor.observing.spans import ComponentTimer
from asa.executor.training.clock import seconds_between
from asa.executor.training.worker import Worker
from asa.instruments.allocations import quiet
from asa.ir.codec import write
from asa.ir.streams import Stream, piece, process
from asa.sharding.collectives import direct
from asa.sharding.collectives.transfer import Link

_BEGIN = "asa.timeline.begin"
_COLLECTIVES = (
    (dist, "all_reduce"), (dist, "all_gather"), (dist, "broadcast"), (dist, "all_to_all_single"),
    (direct, "all_reduce"), (direct, "broadcast"), (direct, "all_gather_into_tensor"),
    (direct, "reduce_scatter_tensor"),
)  # fmt: skip
_SENDS: tuple[Stream, Stream] = ("sending on", "sending back")


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work, in seconds since recording began. ``microbatch`` is None if it belongs to all of them."""

    name: str
    kind: str
    stream: Stream
    start_s: float
    end_s: float
    microbatch: int | None = None


class Recorder(ComponentTimer):
    """Records what a worker does inside :meth:`recording`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._model = worker.model
        self.names = [c.name for c in worker.model.components]
        self.spans: list[Span] = []
        self.steps: list[tuple[float, float]] = []
        self._marks: list[tuple[str, int, Any]] = []
        self._blocking: list[tuple[str, str, float, float]] = []
        self._directions: list[Stream] = []
        self._depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which steps are recorded; afterwards ``spans`` has them."""
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(self._hooked(self._note))
            if not self._cuda:
                stack.enter_context(self._collectives())
            for link, stream in zip((self._model.links.leaving, self._model.links.gradient_out), _SENDS, strict=True):
                if link is not None:
                    stack.enter_context(self._sends(link, stream))
            recorded = stack.enter_context(profile(use_device="cuda" if self._cuda else None))
            if self._cuda:
                torch.cuda.synchronize()
            self._began = self._now()
            with record_function(_BEGIN):
                pass
            yield
            if self._cuda:
                torch.cuda.synchronize()
        self._read_all(recorded)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context around one step. Messages between ranks outside of steps are not recorded."""
        self._marks.append(("step", -1, self._now()))
        yield
        self._marks.append(("over", -1, self._now()))

    def _note(self, what: str, i: int) -> None:
        self._depth += {"enter": 1, "leave": -1}.get(what, 0)
        self._marks.append((what, i, self._now()))

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        """Context in which calls of blocking collectives are timed."""
        usual = [(room, name, getattr(room, name)) for room, name in _COLLECTIVES]

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def timing(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = call(*args, **kwargs)
                if result is None or (isinstance(result, direct.Pending) and result.over):
                    # Gradients and weights are exchanged with one of these options, also through shared memory.
                    state = not kwargs.keys().isdisjoint(("mean", "op", "async_op"))
                    kind = "gradient" if state else "inside" if self._depth else "boundary"
                    self._blocking.append((name, kind, start, time.perf_counter()))
                return result

            return timing

        for room, name, call in usual:
            setattr(room, name, timed(name, call))
        try:
            yield
        finally:
            for room, name, call in usual:
                setattr(room, name, call)

    @contextmanager
    def _sends(self, link: Link, stream: Stream) -> Iterator[None]:
        """Context in which the direction of each message is recorded."""
        usual = link._started

        def started(work: dist.Work | None) -> dist.Work:
            self._directions.append(stream)
            return usual(work)

        link._started = started  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del link._started

    def _read_all(self, recorded: Any) -> None:
        profiled = self._profiled(recorded)
        blocking = [
            Span(name=n, kind=k, stream="communication", start_s=a - self._began, end_s=b - self._began)
            for n, k, a, b in self._blocking
        ]
        computed = [part for span in _without_overlaps(self._computed()) for part in _without(span, blocking)]
        additional = [s for s in profiled if not any(_same(s, b) for b in blocking)]
        spans = [s for s in (*computed, *blocking, *additional) if any(a <= s.start_s < b for a, b in self.steps)]
        self.spans = sorted(spans, key=lambda s: s.start_s)

    def _computed(self) -> list[Span]:
        """Spans of forward, backward and update, from the marks of the hooks."""
        order = self._model.order(self._model.plan.num_microbatches)
        turns = {d: [a.microbatch for a in order if a.direction == d] for d in ("forward", "backward")}
        spans: list[Span] = []
        begun: dict[tuple[str, int], float] = {}
        forwards = backwards = -1
        for what, i, mark in self._marks:
            at = seconds_between(self._began, mark)
            if what == "step":
                forwards = backwards = -1
                begun = {("step", -1): at}
            elif what == "over":
                self.steps.append((begun.pop(("step", -1)), at))
            elif what == "leave" and ("enter", i) in begun:
                spans.append(self._work(i, "forward", begun.pop(("enter", i)), at, _of(turns["forward"], forwards)))
            elif what == "through" and ("back", i) in begun:
                spans.append(self._work(i, "backward", begun.pop(("back", i)), at, _of(turns["backward"], backwards)))
            elif what == "done":
                for key in [k for k in begun if k[0] == "back"]:
                    spans.append(self._work(key[1], "backward", begun.pop(key), at, _of(turns["backward"], backwards)))
            elif what == "updated" and ("update", -1) in begun:
                start = begun.pop(("update", -1))
                spans.append(Span(name="parameters", kind="update", stream="compute", start_s=start, end_s=at))
            else:
                forwards += what == "enter" and i == 0
                backwards += what == "turn"
                begun[what, i] = at
        return spans

    def _work(self, i: int, kind: str, start: float, end: float, microbatch: int | None) -> Span:
        return Span(name=self.names[i], kind=kind, stream="compute", start_s=start, end_s=end, microbatch=microbatch)

    def _profiled(self, recorded: Any) -> list[Span]:
        """Spans of the communication libraries' own work, from the profiler."""
        events = recorded.kineto_results.events()
        begin = next((e.start_ns() for e in events if e.name() == _BEGIN), None)
        if begin is None:
            return []
        directions = iter(self._directions)
        spans = []
        for e in sorted(events, key=lambda e: e.start_ns()):
            name = _operation(e.name())
            if name is None:
                continue
            start, length = (e.start_ns() - begin) / 1e9, e.duration_ns() / 1e9
            stream, kind = ("communication", "gradient")
            if name == "send":
                if e.name().startswith("gloo:"):
                    length = 0.0  # gloo's event lasts until the sender waits, which may be long after the arrival
                stream, kind = next(directions, "sending on"), "transfer"
                name = f"to stage {self._model.position.stage + (1 if stream == 'sending on' else -1)}"
            elif name == "recv":
                continue
            spans.append(
                Span(name=name, kind=kind, stream=stream, start_s=start, end_s=start + length)  # type: ignore[arg-type]
            )
        return spans

    def document(self, rank: int) -> dict[str, Any]:
        """The trace of ``rank`` in Chrome's trace format, with the same names as the simulator's timelines."""
        plan, stage = self._model.plan, self._model.position.stage
        events = process(rank, stage, len(plan.stages), "measured", {s.stream for s in self.spans})
        events += [piece(s.name, s.kind, s.stream, rank, s.start_s, s.end_s, s.microbatch) for s in self.spans]
        events += [
            {"name": f"step {i}", "ph": "i", "s": "p", "ts": at * 1e6, "pid": rank, "tid": 0}
            for i, (at, _) in enumerate(self.steps)
        ]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"model": plan.model_spec, "rank": rank, "steps": len(self.steps)},
        }

    def save(self, path: Path, rank: int) -> None:
        """Write :meth:`document`, compressed.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps(self.document(rank), allow_nan=False).encode()
        write(gzip.compress(text, mtime=0), path)


def _of(turns: list[int], k: int) -> int | None:
    return turns[k] if 0 <= k < len(turns) else None


def _operation(name: str) -> str | None:
    """Name of a collective, such as ``all_reduce``, from ``gloo:all_reduce`` or ``ncclDevKernel_AllReduce...``; None if
    ``name`` is not communication."""
    if name.startswith("gloo:"):
        return name[5:].strip("_")
    if name.startswith("ncclDevKernel_"):
        kind = name[len("ncclDevKernel_") :].split("_")[0].split("(")[0]
        return {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
                "Broadcast": "broadcast", "SendRecv": "send"}.get(kind, kind.lower())  # fmt: skip
    return None


def _without_overlaps(spans: list[Span]) -> list[Span]:
    """``spans`` without overlaps. The hook of the next component may run before the end of the previous one is
    recorded."""
    disjoint: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        start = max(span.start_s, disjoint[-1].end_s) if disjoint else span.start_s
        if start < span.end_s:
            disjoint.append(replace(span, start_s=start))
    return disjoint


def _without(span: Span, blocking: list[Span]) -> list[Span]:
    """The parts of ``span`` outside the spans ``blocking``."""
    parts, start = [], span.start_s
    for b in sorted(blocking, key=lambda b: b.start_s):
        if b.end_s <= start or b.start_s >= span.end_s:
            continue
        if b.start_s > start:
            parts.append(replace(span, start_s=start, end_s=b.start_s))
        start = max(start, b.end_s)
    return [*parts, replace(span, start_s=start)] if start < span.end_s else parts


def _same(work: Span, call: Span) -> bool:
    """Whether ``work``, recorded by the library, is what ``call`` waited for."""
    return call.start_s <= work.start_s + 1e-5 and work.end_s <= call.end_s + 1e-4
