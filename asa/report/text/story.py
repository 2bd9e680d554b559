"""The history of a run from its log: what was slow and when, what was done about it, and the gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import RenderableType

from asa.ir.codec import noun
from asa.report.text.tables import folded, line, table
from asa.report.text.training import replan_line
from asa.report.units import percent, ranks, seconds


@noun
class Stretch:
    """Steps under one plan without finding or change in between. ``step_s``: their mean; ``plan``: its fingerprint."""

    first_step: int
    last_step: int
    plan: str
    step_s: float


CHANGES = ("switch", "rollback", "memory", "enough", "lost")
"""Kinds of events after which another plan is in force."""
PREFIX = {"finding": "slow: ", "quick": "fast: ", "over": "over: "}
"""Beginning of the line for an event, by kind."""


def kind_of(finding: Mapping[str, Any]) -> str:
    """Kind of a finding: something is slow (``finding``), all ranks are faster than predicted (``quick``), or it is
    ``over``."""
    if finding.get("ended"):
        return "over"
    everywhere = finding.get("where") is None and finding.get("cause") in ("compute", "everything")
    return "quick" if everywhere and 0 < float(finding.get("factor", 1)) < 1 else "finding"


def said(event: Mapping[str, Any]) -> str | None:
    """The line that people read about an event of a run: a finding, a decision or a note. None for other events."""
    match event["event"]:
        case "finding":
            return f"{PREFIX[kind_of(event)]}{event['line']}"
        case "replan":
            return replan_line(event)
        case "note" | "lost" | "returned":
            return str(event["message"])
        case _:
            return None


def _finite(value: Any) -> float:
    """``value`` as a number.

    Raises:
        ValueError, TypeError: it is none, or not finite.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


@noun
class Happening:
    """An event after ``step`` steps, described in ``line``: a finding (``finding``, ``quick`` if all is faster than
    predicted) or its end (``over``), a decision (``switch``, ``rollback``, ``keep``, ``wait``, ``outcome``,
    ``memory``, ``lost``), or another (``start``, ``note``, ``end``)."""

    step: int
    epoch: int | None
    kind: str
    line: str


@noun
class Worth:
    """A change of plan: predicted and measured gain as fractions of a step, seconds of the change, and seconds won by
    it until the next finding or change (None if there was no step before or after it)."""

    step: int
    plan: str
    predicted_gain: float | None
    measured_gain: float | None
    change_s: float
    won_s: float | None


@noun
class Story:
    """The complete history, in order of steps."""

    stretches: tuple[Stretch, ...]
    happenings: tuple[Happening, ...]
    changes: tuple[Worth, ...]

    @property
    def times_changed(self) -> int:
        """How often another plan came into force, also when the run was started again."""
        plans = [s.plan for s in self.stretches]
        told = sum(h.kind in CHANGES for h in self.happenings)
        return max(told, sum(a != b for a, b in pairwise(plans)))


def story(events: Iterable[Mapping[str, Any]]) -> Story:
    """The history that the events of a log contain; anything else is skipped."""
    teller = _Teller()
    for event in events:
        try:
            teller.add(event)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
    return teller.finished()


class _Teller:
    def __init__(self) -> None:
        self.step, self.plan = 0, ""
        self.stretches: list[Stretch] = []
        self.happenings: list[Happening] = []
        self.changes: list[dict[str, Any]] = []
        self._first: int | None = None
        self._seconds, self._steps = 0.0, 0
        self._goes_on: bool | None = None
        """Whether the end of the run is still to come; None before a beginning."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Process one event of ``log.jsonl``."""
        match event["event"]:
            case "start":
                if self._goes_on:
                    self._note({}, "end", "the run was broken off")
                self._goes_on = True
                self._resumed(event)
                data = event["data"]
                source = data[0] if isinstance(data, list | tuple) else data
                self._note(event, "start", f"{event['model']} on {ranks(event['ranks'])}; {source}")
            case "steps":
                self._stepped(int(event["step"]), float(event["step_time_s"]))
            case "epoch":
                # An epoch without a logged step is shown by its own measurements.
                if int(event["step"]) > self.step:
                    self._stepped(int(event["step"]), float(event["measurements"]["step_time"]["median"]))
            case "finding":
                self._end()
                self._note(event, kind_of(event), str(event["line"]))
            case "replan":
                self._decided(event)
            case "note" | "lost" | "returned":
                if "resumed_step" in event:
                    self._resumed(event)
                self._note(event, "note", str(event["message"]))
            case "end":
                self._goes_on = False
                self._end()
                self._note(event, "end", f"{event['status']}, exit code {event['exit_code']}")
            case _:
                pass

    def _resumed(self, event: Mapping[str, Any]) -> None:
        """Process a start of all ranks, under the plan and after the step that ``event`` tells."""
        self._end()
        self.plan, step = str(event["plan_fingerprint"]), event.get("resumed_step")
        self.step = step if isinstance(step, int) and step > 0 else 0

    def _stepped(self, step: int, step_s: float) -> None:
        self._goes_on = None if self._goes_on is None else True
        if step <= self.step:  # a run that went on from a checkpoint
            self._end()
            self.step = min(self.step, step - 1)
        if not (math.isfinite(step_s) and step_s >= 0):
            return
        self._first = self.step + 1 if self._first is None else self._first
        self._seconds, self._steps = self._seconds + step_s * (step - self.step), self._steps + step - self.step
        self.step = step

    def _decided(self, event: Mapping[str, Any]) -> None:
        kind = str(event["kind"])
        if kind in CHANGES:
            self._end()
            self.plan = str(event["new"])
        if kind in ("switch", "rollback"):
            gain, took = event.get("predicted_gain"), _finite(event["seconds"])
            gain = None if gain is None else _finite(gain)
            self.changes.append(
                {"step": self.step, "plan": self.plan, "predicted_gain": gain, "measured_gain": None, "change_s": took}
            )
        if kind == "outcome" and self.changes:
            self.changes[-1]["measured_gain"] = _finite(event["measured_gain"])
        self._note(event, kind, replan_line(event))

    def _note(self, event: Mapping[str, Any], kind: str, text: str) -> None:
        epoch = event.get("epoch")
        self.happenings.append(
            Happening(step=self.step, epoch=epoch if isinstance(epoch, int) else None, kind=kind, line=text)
        )

    def _end(self) -> None:
        """End the current stretch."""
        if self._first is not None and self._steps and math.isfinite(self._seconds):
            self.stretches.append(
                Stretch(first_step=self._first, last_step=self.step, plan=self.plan, step_s=self._seconds / self._steps)
            )
        self._first, self._seconds, self._steps = None, 0.0, 0

    def finished(self) -> Story:
        """The complete history."""
        self._end()
        if self._goes_on:
            self._note({}, "end", "the log has no end: the run goes on, or was broken off")
        changes = []
        for change in self.changes:
            before = [s for s in self.stretches if s.last_step == change["step"]]
            after = [s for s in self.stretches if s.first_step == change["step"] + 1]
            won = None
            if before and after:
                steps = after[0].last_step - after[0].first_step + 1
                won = steps * (before[-1].step_s - after[0].step_s) - change["change_s"]
            changes.append(Worth(**change, won_s=won))
        return Story(stretches=tuple(self.stretches), happenings=tuple(self.happenings), changes=tuple(changes))


def render(history: Story) -> list[RenderableType]:
    """Text of the history: events, step times in between, and the gain of every change."""
    parts: list[RenderableType] = []
    for h in history.happenings:
        at = f"step {h.step}" + ("" if h.epoch is None else f" (epoch {h.epoch + 1})")
        parts.append(line(folded(f"{at}: {PREFIX.get(h.kind, '')}{h.line}")))
    if history.stretches:
        steps = table("Step time", ("steps", "plan", "step"), left=2)
        for s in history.stretches:
            steps.add_row(f"{s.first_step} to {s.last_step}", s.plan, seconds(s.step_s))
        parts += [line(""), steps]
    if history.changes:
        result = table("Changes of plan", ("after step", "to plan", "promised", "measured", "change", "won"), left=2)
        for c in history.changes:
            result.add_row(
                str(c.step),
                c.plan,
                percent(c.predicted_gain, signed=True),
                percent(c.measured_gain, signed=True),
                seconds(c.change_s),
                seconds(c.won_s),
            )
        parts += [line(""), result]
    elif history.stretches and not history.times_changed:
        parts.append(line("the plan was never changed"))
    return parts
