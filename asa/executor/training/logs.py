"""Output of a run: a line of JSON per event, curves for trackers if requested, and ``result.json`` however it ends.

Events are dicts with a key ``event``:

=============  =====================================================================================================
``start``      run, plan and settings, data sources, steps and samples per epoch, the resumed step, torchrun line
``note``       ``message``: something the user should know (a fallback, samples left out, more ranks than cores); where
               all ranks are started again, also the resumed step, the plan's fingerprint, and the number of ranks
``steps``      since the last such event: epoch, step, loss, accuracy, learning_rate, step_time_s, samples_per_s,
               data_wait_share, slowest_rank and waiting_share (largest share of a step that others wait for it; null
               if ranks are not observed), active_memory_bytes and reserved_memory_bytes (peaks of the rank that
               reports, reserved by CUDA's allocator alone; null if unknown), tflops_per_s of all ranks and mfu (their
               share of the devices' peak; missing if the profile or the peak is unknown), gpu of the rank that
               reports (utilisation, clock_mhz, watts, held_back, others; missing without one), fraction of the
               run done, eta_s
``epoch``      an :class:`asa.ir.measurements.EpochRecord`, and ``line``: predicted against measured, in words
``replan``     a change of plan: reason, predicted gain, and later the measured one; with ``kind`` ``memory`` after a
               rank ran out of memory, or nearly did: the shortage, and what was done; with ``kind`` ``lost`` after a
               rank was lost for good: why, which one, and how many are left
``lost``       rank, ``message``: a rank was lost, and the others go on without it
``returned``   rank, ``message``: a process has taken its place
``checkpoint`` step, path
``end``        exit_code, status, message
=============  =====================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asa.errors import InvalidInputError, UnavailableError
from asa.executor.training import trackers
from asa.ir import codec
from asa.ir.codec import SCHEMA_VERSION
from asa.ir.measurements import EpochRecord
from asa.reading import MOST_BYTES, open_regular

Event = dict[str, Any]
Announce = Callable[[Event], None]

LOG = "log.jsonl"
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of a sample's forward and backward, and a device's mean peak in FLOP/s (0: unknown)."""

    flops_per_sample: float
    peak_flops_per_s: float

    def rate(self, samples_per_s: float, ranks: int) -> Event:
        """Fields of a ``steps`` event: TFLOP/s of all ``ranks``, and MFU if the peak is known."""
        flops_per_s = self.flops_per_sample * samples_per_s
        peak = self.peak_flops_per_s * ranks
        return {"tflops_per_s": flops_per_s / 1e12, **({"mfu": flops_per_s / peak} if peak else {})}


class RunLog:
    """Writes a run's events under ``folder`` and passes them on to trackers and ``listener``."""

    def __init__(
        self,
        folder: Path,
        *,
        track: tuple[str, ...] = (),
        work: Work | None = None,
        target: float | None = None,
        price: float | None = None,
        listener: Announce | None = None,
    ) -> None:
        """``track``: names of trackers that also get the run's curves. ``target`` and ``price``: as in
        :class:`~asa.executor.training.settings.TrainSettings`.

        Raises:
            UnavailableError: a requested tracker is not installed.
        """
        self.epochs: list[Event] = []
        self.shortages: list[Event] = []
        self.changed = False
        self.checkpoint: str | None = None
        """Path of the newest checkpoint, from which this run could be continued."""
        self.fingerprint: str | None = None
        self.folder, self._listener = folder, listener
        self._track, self._trackers = track, dict[str, trackers.Tracker]()
        self._work, self._ranks = work, 0
        self._target, self._price = target, price
        self._facts: Event = {}
        self._began = time.monotonic()
        self._may_be_torn = True
        """Whether the last line of the log may lack its end, after a run that was killed or a disk that was full."""
        trackers.check(track)

    def __call__(self, event: Event) -> None:
        """Record one event.

        Raises:
            UnavailableError: the log cannot be written. InvalidInputError: its path is not a regular file.
        """
        if event["event"] == "steps" and self._work is not None and self._ranks:
            event = {**event, **self._work.rate(event["samples_per_s"], self._ranks)}
        line = json.dumps({"time": round(time.time(), 3), **event}, allow_nan=False).encode() + b"\n"
        if self._may_be_torn and _is_torn(self.folder / LOG):
            line = b"\n" + line
        try:
            with open_regular(self.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as stream:
                stream.write(line)
            self._may_be_torn = False
        except OSError as error:
            self._may_be_torn = True
            rest = f"; --resume continues from {self.checkpoint}" if self.checkpoint else ""
            raise UnavailableError(f"cannot write {self.folder / LOG}: {error.strerror or error}{rest}") from None
        match event["event"]:
            case "epoch":
                self.epochs.append(_record(event))
            case "checkpoint":
                self.checkpoint = event["path"]
            case "start":
                self.fingerprint, self._ranks = event["plan_fingerprint"], event["ranks"]
                self._facts = {k: event[k] for k in ("model", "ranks", "device", "global_batch", "plan_fingerprint")}
            case "note" if "resumed_step" in event:  # a change of plan since the start need not hold any longer
                self.fingerprint, self._ranks = event["plan_fingerprint"], event["ranks"]
            case "replan" if event["kind"] == "memory":
                self.shortages.append(_without(event, "event", "kind", "predicted_gain"))
                self.fingerprint, self.changed = event["new"], False
            case "replan" if event["kind"] in ("lost", "enough"):
                self.fingerprint, self.changed = event["new"], False
            case "replan" if event["kind"] in ("switch", "rollback"):
                self.changed = True
        if event["event"] == "replan":
            self._ranks = event.get("ranks") or len(event.get("processes") or ()) or self._ranks
        if self._track:
            self._draw(event)
        if self._listener is not None:
            self._listener(event)

    def recall(self, before: int) -> None:
        """Load the epochs before ``before``, and all memory shortages, from the log of the run that is continued.
        Incomplete lines at its end are skipped."""
        records: dict[int, Event] = {}
        shortages: list[Event] = []
        for event in _events(self.folder):
            with contextlib.suppress(ValueError, KeyError, TypeError, InvalidInputError):
                if event["event"] == "epoch" and event["epoch"] < before:
                    record = _record(event)
                    codec.build(EpochRecord, record, source=LOG)
                    records[record["epoch"]] = record
                elif event["event"] == "replan" and event["kind"] == "memory":
                    shortages.append(_without(event, "time", "event", "kind", "predicted_gain"))
        self.epochs = [records[epoch] for epoch in sorted(records)]
        self.shortages = shortages

    def _draw(self, event: Event) -> None:
        curves = trackers.figures(event)
        if not curves:
            return
        # Not opened earlier, because they start threads, and ranks are forked before the first event.
        for kind in [k for k in self._track if k not in self._trackers]:
            self._trackers[kind] = trackers.opened(kind, self.folder, self.folder.name, self._facts)
        for kind in self._track:
            self._or_without(kind, partial(self._trackers[kind].log, curves, event["step"]))

    def _or_without(self, kind: str, write: Callable[[], None]) -> None:
        """Call ``write`` of a tracker. If it fails, training goes on without this tracker, and a note says so."""
        try:
            write()
        except Exception as error:
            self._track = tuple(k for k in self._track if k != kind)
            reason = trackers.reason(error)
            self({"event": "note", "message": f"curves for {kind} end here, training goes on without: {reason}"})

    def finish(self, *, exit_code: int, message: str = "", rank: int | None = None) -> Event:
        """Write ``result.json`` (unless that is what failed), announce the end, and return the document."""
        status = {0: "done", 75: "pre-empted", 130: "interrupted"}.get(exit_code, "failed")
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "result",
            "exit_code": exit_code,
            "status": status,
            "message": message,
            "rank": rank,
            "plan_fingerprint": self.fingerprint,
            "checkpoint": self.checkpoint,
            "epochs": self.epochs,
            "shortages": self.shortages,
            "summary": _summary(self.epochs[-1]["measurements"]) if self.epochs else None,
            "seconds": round(time.monotonic() - self._began, 3),
            **({} if self._target is None and self._price is None else {"aim": self._aim()}),
        }
        temporary = self.folder / f".{RESULT}.tmp"
        try:
            temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(temporary, self.folder / RESULT)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        with contextlib.suppress(UnavailableError, InvalidInputError):
            for kind in [k for k in self._track if k in self._trackers]:
                self._or_without(kind, partial(self._trackers[kind].close, succeeded=exit_code == 0))
            self({"event": "end", "exit_code": exit_code, "status": status, "message": message})
        return document

    def _aim(self) -> Event:
        """Time and cost of this run's epochs with their validation, over all its sessions, and up to the first epoch
        with the target; costs in the currency of the price."""
        reached: int | None = None
        seconds = cost = 0.0
        course: list[tuple[float, float]] = []
        for epoch in self.epochs:
            seconds += epoch["seconds"]
            cost += epoch["seconds"] / 3600 * epoch["measurements"]["num_ranks"] * (self._price or 0.0)
            course.append((seconds, cost))
            figure = epoch["validation_accuracy"]
            if reached is None and self._target is not None and figure is not None and figure >= self._target:
                reached = len(course)
        at = None if reached is None else course[reached - 1]
        priced = self._price is not None
        return {
            "target_accuracy": self._target,
            "price": self._price,
            "epochs": len(course),
            "seconds": seconds,
            "cost_of_run": cost if priced else None,
            "cost_per_epoch": cost / len(course) if priced and course else None,
            "epochs_to_target": reached,
            "seconds_to_target": None if at is None else at[0],
            "cost_to_target": at[1] if at is not None and priced else None,
        }


def last_settings(folder: Path) -> Event:
    """Settings of the newest run whose log is in ``folder``, as data
    (:class:`asa.executor.training.settings.TrainSettings`). Empty if there is none."""
    settings: Event = {}
    for event in _events(folder):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if event["event"] == "start":
                settings = dict(event["settings"])
    return settings


def _events(folder: Path) -> Iterator[Event]:
    """Events in the log of a run, without broken lines; none if there is no log."""
    with contextlib.suppress(OSError, InvalidInputError), open_regular(folder / LOG) as stream:
        while line := stream.readline(MOST_BYTES):
            with contextlib.suppress(InvalidInputError):
                yield codec.parse(line.decode(errors="replace"), source=LOG)


def known(event: Event) -> Event:
    """``event`` with None for numbers that are unknown, because JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}


def _is_torn(path: Path) -> bool:
    """Whether the last line of a log lacks its end. What is appended to it would be unreadable, too."""
    with contextlib.suppress(OSError, InvalidInputError), open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size:
            stream.seek(-1, os.SEEK_END)
            return bool(stream.read(1) != b"\n")
    return False


def _record(event: Event) -> Event:
    """The :class:`asa.ir.measurements.EpochRecord` in an ``epoch`` event."""
    return _without(event, "time", "event", "line")


def _without(event: Event, *names: str) -> Event:
    return {k: v for k, v in event.items() if k not in names}


def _summary(measured: Event) -> Event:
    """Predicted and measured values of the last epoch; memory per rank is None if it was not tracked."""
    time, wait = measured["step_time"], measured["data_wait_s"]
    return {
        "step_time_s": {"predicted": measured["predicted_step_time_s"], "measured": time["median"], "n": time["n"]},
        "memory_bytes_per_rank": {
            "predicted": measured["predicted_memory_bytes"],
            "measured": measured["peak_memory_bytes"],
        },
        "data_wait_share": wait / (wait + time["median"]) if wait + time["median"] > 0 else 0.0,
        "samples_per_s": measured["global_batch"] / (wait + time["median"]) if wait + time["median"] > 0 else None,
    }
