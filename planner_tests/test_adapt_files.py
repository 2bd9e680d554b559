"""What a run leaves behind of its adapting: corrected files for the next plan, and a story to be told."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import nouns
import pytest
from test_adapt_laws import PROFILE, STEPS, _first, _model, _run, _slowness, _world

from asa.cli import entry
from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cli.replanning import keep_corrected
from asa.interfaces.executor import EpochOutcome, Look
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.report.pages.run import first_sentence
from asa.report.text.story import render, story
from asa.report.text.tables import plain
from benchmarks.simulated_world import World


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in which rank 0 of two took three times as long as it should."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    codec.save(_first(2, PROFILE), folder / "plan.json")
    keep_corrected(_model(2), folder, _slowness(2, rank=0, by=3.0))
    return folder


def test_the_next_plan_is_made_from_what_a_run_has_learnt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["plan", "--from-run", str(run), "-o", "next.json"]) == 0
    said = capsys.readouterr().err
    assert "as the run in" in said
    assert "rank 0, slow" in said
    made = codec.load(Plan, Path("next.json"))
    assert (made.gpus, made.global_batch, made.optimizer) == (2, 8, "sgd")
    profile, cluster = origins(made, Console())
    assert [d.speed for d in cluster.devices or ()] == pytest.approx([1.0, 1 / 3])
    assert codec.fingerprint(profile) == codec.fingerprint(PROFILE), "nothing was common to all"
    assert entry.run(["explain", "next.json"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "resnet18", "--from-run", "run"], 2, "leave out a model or profile"),
        (["plan", "--from-run", "run", "--cluster", "a100-nvlink-8"], 2, "leave out --cluster"),
        (["plan", "--from-run", "elsewhere"], 3, "--from-run elsewhere does not exist"),
    ],
)
def test_what_cannot_be_planned_from_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert entry.run(words) == code
    assert said in capsys.readouterr().err


def test_links_and_common_slowness_go_into_the_files(run: Path) -> None:
    truth = dataclasses.replace(_slowness(2, links=4.0, all_=2.0), residual=math.log(1.1))
    keep_corrected(_model(2), run, truth)
    profile, cluster = (
        codec.load(Profile, run / "corrected.profile.json"),
        codec.load(Cluster, run / "corrected.cluster.json"),
    )
    assert profile.timings[0].forward.median == pytest.approx(2.2 * PROFILE.timings[0].forward.median)
    before, after = (c.levels[0].tables[0].points[0][1] for c in (nouns.cluster(2), cluster))
    assert after == pytest.approx(8.8 * before)


class Logged(World):
    """Has a line in the log for every window, as a real executor."""

    log: list[dict[str, Any]]

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        def noted(measured: Measurements, step: int) -> None:
            self.log.append({"event": "steps", "step": step, "step_time_s": measured.step_time.median})
            assert look is not None
            look(measured, step)

        return super().run_epoch(epoch, noted)


def _log(folder: Path) -> list[dict[str, Any]]:
    """A disturbed run as its log has it, with a torn line and one of somebody else's."""
    world = _world(2, _slowness(2, rank=1, by=4.0), kind=Logged)
    _, told = _run(world)
    start = {
        "event": "start", "plan_fingerprint": codec.fingerprint(_first(2, PROFILE)), "model": "tiny", "ranks": 2,
        "data": ["synthetic images", ""],
    }  # fmt: skip
    events = [start, *told, {"event": "end", "exit_code": 0, "status": "done", "message": ""}]
    folder.mkdir(exist_ok=True)
    text = "\n".join(json.dumps(e) for e in events)
    (folder / "log.jsonl").write_text(text + '\n[1, 2]\n{"event": "epoch", "step": "many"}\n{"event": "st')
    return told


def test_the_story_of_a_run_says_what_was_slow_what_was_done_and_what_it_won(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _log(tmp_path)
    found = story(told)
    assert [h.kind for h in found.happenings] == ["finding", "switch", "outcome", "over", "switch", "outcome"]
    away, back = found.changes
    assert away.measured_gain == pytest.approx(away.predicted_gain, abs=0.01)
    assert (away.won_s or 0) + away.change_s > 0  # the stretch is too short to win back what the change took
    assert back.plan == codec.fingerprint(_first(2, PROFILE))
    text = plain(render(found), width=120)
    assert "slow: rank 1's compute takes 4 times as long as predicted" in text
    assert "on rank 0, " in text
    assert entry.run(["explain", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "tiny on 2 ranks; synthetic images" in said
    assert "done, exit code 0" in said
    assert entry.run(["explain", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["kind"], len(data["changes"])) == ("story", 2)
    assert sum(s["last_step"] - s["first_step"] + 1 for s in data["stretches"]) == 8 * STEPS


def _start(plan: str, resumed_step: int | None = None) -> dict[str, Any]:
    return {
        "event": "start", "plan_fingerprint": plan, "model": "cnn", "ranks": 2, "data": ["digits"],
        "resumed_step": resumed_step,
    }  # fmt: skip


def _steps(step: int) -> dict[str, Any]:
    return {"event": "steps", "step": step, "step_time_s": 0.1}


_END: dict[str, Any] = {"event": "end", "exit_code": 0, "status": "done", "message": ""}


def test_a_run_that_was_killed_is_told_to_be_and_goes_on_after_the_step_that_was_saved() -> None:
    killed = story([_start("a"), _steps(50), _steps(100)])
    assert killed.happenings[-1].line == "the log has no end: the run goes on, or was broken off"
    found = story([_start("a"), _steps(50), _steps(100), _start("a", 60), _steps(80), _END])
    assert [(h.kind, h.step) for h in found.happenings] == [("start", 0), ("end", 100), ("start", 60), ("end", 80)]
    assert found.happenings[1].line == "the run was broken off"
    assert [(s.first_step, s.last_step) for s in found.stretches] == [(1, 100), (61, 80)]
    assert "the plan was never changed" in plain(render(found), width=120)
    # A job may train on after an end.
    assert story([_start("a"), _steps(5), _END, _steps(9)]).happenings[-1].line.startswith("the log has no end")


def test_steps_after_a_restart_are_those_of_the_plan_that_all_ranks_are_started_with() -> None:
    switch = {"event": "replan", "kind": "switch", "new": "b", "why": "w", "predicted_gain": 0.1, "seconds": 1.0}
    again = {"event": "note", "message": "continuing after step 6", "resumed_step": 6, "plan_fingerprint": "a"}
    found = story([_start("a"), _steps(8), switch, _steps(12), again, _steps(9), _END])
    assert [(s.first_step, s.last_step, s.plan) for s in found.stretches] == [(1, 8, "a"), (9, 12, "b"), (7, 9, "a")]


@pytest.mark.parametrize("kind", ["memory", "lost", None])
def test_a_plan_that_was_changed_between_starts_is_not_said_to_have_stayed(kind: str | None) -> None:
    told = {"event": "replan", "kind": kind, "new": "b", "why": "w", "strategy": "ddp", "ranks": 1, "ranks_before": 2,
            "promised_bytes": 1 << 20}  # fmt: skip
    change = [told] if kind else [_END, _start("b", 5)]
    found = story([_start("a"), _steps(5), *change, _steps(9), _END])
    assert found.times_changed == 1
    assert "never changed" not in plain(render(found), width=120)
    assert "the plan was changed once" in first_sentence(found)


def test_workers_that_were_lost_and_came_back_are_in_the_story() -> None:
    lost, back = ({"event": e, "rank": 1, "message": f"rank 1 {e}"} for e in ("lost", "returned"))
    found = story([_start("a"), lost, back, _END])
    assert [h.line for h in found.happenings][1:3] == ["rank 1 lost", "rank 1 returned"]


def test_a_log_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["explain", str(tmp_path)]) == 3
    assert "has no log.jsonl" in capsys.readouterr().err
    os.mkfifo(tmp_path / "log.jsonl")
    assert entry.run(["explain", str(tmp_path)]) == 3
    assert "not a regular file" in capsys.readouterr().err
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").write_bytes(os.urandom(1000))
    assert entry.run(["explain", str(tmp_path)]) == 3
    assert "tells of no run" in capsys.readouterr().err
    _log(tmp_path)
    assert entry.run(["explain", str(tmp_path), "--why-not", "ddp"]) == 2


@pytest.mark.parametrize("value", ["x", math.nan, math.inf, [1], {"a": 1}, -(10**400), True, None])
def test_numbers_of_a_log_that_are_none_are_passed_over(run: Path, value: Any) -> None:
    events: list[dict[str, Any]] = [
        {"event": "start", "plan_fingerprint": "a", "model": "cnn", "ranks": value, "data": value},
        {"event": "steps", "step": 1, "step_time_s": 1e308},
        {"event": "steps", "step": 9, "step_time_s": 1e308},
        {"event": "replan", "kind": "switch", "new": "b", "why": value, "predicted_gain": value, "seconds": 1.0},
        {"event": "replan", "kind": "switch", "new": "b", "why": "w", "predicted_gain": 0.1, "seconds": value},
        {"event": "replan", "kind": "outcome", "predicted_gain": 0.1, "measured_gain": value},
        {"event": "epoch", "epoch": value, "seconds": value, "step": 9, "train_loss": value, "validation_loss": value,
         "validation_accuracy": value, "measurements": {"predicted_memory_bytes": value}},
        {"event": "end", "status": value, "exit_code": value},
    ]  # fmt: skip
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert entry.run(["explain", "run", "--json"]) == 0
    assert entry.run(["explain", "run", "--report", "page"]) == 0
