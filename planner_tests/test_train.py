"""Whole runs on forked ranks: they learn, they resume to the bit, they agree, and they say how they ended."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

from asa.errors import (
    InvalidInputError,
    NoCheckpointError,
    PreemptedError,
    UnavailableError,
    UsageError,
    WorkersFailedError,
)
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint, worker
from asa.executor.training.settings import TrainSettings
from asa.interfaces.executor import Executor
from asa.ir import codec
from asa.ir.measurements import EpochRecord
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.strategies import offered

Events = list[dict[str, Any]]


def _train(plan: Plan, settings: TrainSettings, **changes: Any) -> tuple[dict[str, Any], Events]:
    events: Events = []
    options: dict[str, Any] = {"strategies": offered(), "adapt": adapt, "on_event": events.append}
    return train(plan, settings, **(options | changes)), events


def _of(events: Events, kind: str) -> Events:
    return [e for e in events if e["event"] == kind]


def _result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def _state(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.find(out / outdir.CHECKPOINTS)
    weights = checkpoint.read(found.path, checkpoint.MODEL)
    return weights | checkpoint.read(found.path, checkpoint.OPTIMIZER)


def _is_statistic(name: str) -> bool:
    return "running_" in name


def _assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], *, exact: bool) -> None:
    """Bitwise, but for running statistics, whose averages over ranks round differently when taken at another time."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        if exact and not _is_statistic(name):
            assert torch.equal(value, second[name]), name
        else:
            torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def _tidy(out: Path) -> bool:
    """Nothing left behind: no lock, no temporary file or directory."""
    return not [p for p in out.rglob("*") if "tmp" in p.name or ".old" in p.name or p.name == outdir.LOCK]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_learns_and_leaves_what_it_promises(tmp_path: Path, ranks: int) -> None:
    plan = training.plan(ranks=ranks)
    settings = training.settings(tmp_path, steps_per_epoch=None, lr=0.02, log_every=50, tensorboard=True)
    result, events = _train(plan, settings, command=("train", "a plan.json"))
    assert result == _result(tmp_path)
    assert (result["exit_code"], result["status"], result["message"]) == (0, "done", "")
    records = [codec.build(EpochRecord, e, source="result.json") for e in result["epochs"]]
    assert [(r.epoch, r.step) for r in records] == [(0, 23), (1, 46)]
    assert records[1].validation_accuracy > 0.6, "logistic guessing is 0.1"
    assert records[1].train_loss < records[0].train_loss
    measured = records[1].measurements
    assert measured.step_time.n == 22, "the last, short batch is not measured"
    assert measured.num_ranks == ranks
    assert records[0].measurements.step_time.n == 22 - 3
    assert _tidy(tmp_path)
    assert codec.load(Plan, tmp_path / "plan.json") == plan
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in e.items() if k != "time"} for e in logged] == events
    assert [e["event"] for e in events if e["event"] not in ("steps", "note")] == [
        "start", "epoch", "checkpoint", "epoch", "checkpoint", "end",
    ]  # fmt: skip
    assert events[0]["torchrun"] == (f"torchrun --standalone --nproc-per-node {ranks} -m asa train 'a plan.json'")
    steps = _of(events, "steps")
    assert steps[-1]["fraction"] == 1.0
    assert steps[-1]["eta_s"] == 0
    assert _of(events, "epoch")[0]["line"].startswith("predicted 100 s a step, measured ")
    assert list((tmp_path / "tensorboard").glob("events.*"))
    found = checkpoint.find(tmp_path / outdir.CHECKPOINTS)
    assert (found.manifest.step, found.manifest.position) == (46, 2 * 1437)
    assert result["checkpoint"] == str(found.path)
    moments = checkpoint.read(found.path, checkpoint.OPTIMIZER)
    assert "classifier.weight/momentum_buffer" in moments


def test_ranks_strategies_and_microbatches_do_not_change_what_is_learned(tmp_path: Path) -> None:
    """The network without BatchNorm: fp32 differs in rounding only, over a few steps of an ordinary rate."""
    plans = {
        "one": training.plan("logistic"),
        "ddp": training.plan("logistic", ranks=2),
        "uneven": training.plan("logistic", ranks=3),
        "tensor": training.plan("logistic", ranks=2, split=("model",)),
        "accumulated": training.plan("logistic", ranks=2, microbatches=4),
    }
    states, losses = {}, {}
    for name, plan in plans.items():
        settings = training.settings(tmp_path / name, epochs=1, steps_per_epoch=None)
        result, _ = _train(plan, settings)
        states[name] = _state(tmp_path / name)
        losses[name] = [result["epochs"][0][k] for k in ("train_loss", "validation_loss", "validation_accuracy")]
    for name in plans:
        _assert_equal(states[name], states["one"], exact=False)
        assert losses[name] == pytest.approx(losses["one"], rel=1e-3)


def test_an_interrupted_run_names_the_checkpoint_from_which_it_can_go_on(tmp_path: Path) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            raise KeyboardInterrupt

    settings = training.settings(tmp_path / "run", steps_per_epoch=10)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; --resume continues from .*step_") as caught:
        _train(training.plan(), settings, on_event=interrupt)
    result = _result(tmp_path / "run")
    assert (result["exit_code"], result["status"], result["message"]) == (130, "interrupted", str(caught.value))
    assert Path(result["checkpoint"]).is_dir()


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "sgd"), (2, "sgd"), (2, "adamw")])
def test_pre_empted_and_resumed_equals_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, optimizer: Any
) -> None:
    plan = training.plan(ranks=ranks, optimizer=optimizer)
    make: dict[str, Any] = {"steps_per_epoch": 10, "lr": None, "log_every": 1}
    _train(plan, training.settings(tmp_path / "whole", **make))
    halved = training.settings(tmp_path / "halved", **make)
    training.stopping(monkeypatch, 3)
    with pytest.raises(PreemptedError, match=r"stopped on request after step .*; --resume continues") as caught:
        _train(plan, halved)
    assert caught.value.exit_code == 75
    result = _result(tmp_path / "halved")
    assert (result["exit_code"], result["status"]) == (75, "pre-empted")
    stopped = checkpoint.find(tmp_path / "halved" / outdir.CHECKPOINTS).manifest
    assert stopped.step == 4, "that step is taken"
    assert _tidy(tmp_path / "halved")
    result, events = _train(plan, dataclasses.replace(halved, resume=True))
    assert events[0]["resumed_step"] == stopped.step
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    _assert_equal(_state(tmp_path / "halved"), _state(tmp_path / "whole"), exact=True)


def test_another_plan_and_number_of_ranks_continue_and_no_sample_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 data-parallel ranks, then 1, then 3 with another global batch: the epoch's samples, each exactly once."""
    seen: list[int] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "seen":
            seen.extend(event["samples"])

    def spying(executor: Executor, epochs: range, announce: Any) -> Iterator[EpochRecord]:
        from asa.launch import tell

        real = worker.fetch

        def fetch(images: Any, indices: torch.Tensor, **options: Any) -> Any:
            if options["train"]:
                tell({"event": "seen", "samples": indices.tolist()})
            return real(images, indices, **options)

        worker.fetch = fetch  # type: ignore[assignment]
        return adapt(executor, epochs, announce)

    make = training.settings(tmp_path, epochs=1, steps_per_epoch=None, log_every=1)
    training.stopping(monkeypatch, 3)
    with pytest.raises(PreemptedError):
        _train(training.plan(ranks=2), make, adapt=spying, on_event=note)
    training.stopping(monkeypatch, 8)
    make = dataclasses.replace(make, resume=True)
    with pytest.raises(PreemptedError):
        _train(training.plan(ranks=1), make, adapt=spying, on_event=note)
    assert len(seen) == checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.position
    monkeypatch.undo()
    _train(training.plan(ranks=3, batch=48, split=("classifier",)), make, adapt=spying, on_event=note)
    assert len(seen) == len(set(seen))
    left_out = (1437 - len(seen)) if len(seen) < 1437 else 0
    assert left_out < 6, "at most a batch too small for three ranks"


def _at_epoch(action: Callable[[], None], heard: Path, *, rank: int, epoch: int = 0) -> Any:
    """The usual loop, but ``action`` happens on one rank when ``epoch`` has been saved, and the process that started
    the ranks has said so by the file ``heard``."""

    def loop(executor: Executor, epochs: range, announce: Any) -> Iterator[EpochRecord]:
        for record in adapt(executor, epochs, announce):
            yield record
            if record.epoch == epoch and dist.get_rank() == rank:
                while not heard.exists():
                    time.sleep(0.01)
                action()

    return loop


def _raise() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("action", "rank", "timeout_s", "words"),
    [
        (_raise, 1, 120.0, "rank 1 of 2 failed with ValueError: boom"),
        (lambda: os._exit(9), 0, 120.0, "rank 0 of 2 exited with code 9"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 1, 120.0, "rank 1 of 2 was killed by signal 9"),
        (lambda: time.sleep(600), 1, 6.0, "rank 1 of 2 hung"),
    ],
    ids=["exception", "exit", "kill", "hang"],
)
def test_a_lost_rank_ends_with_6_and_the_run_resumes(
    tmp_path: Path, action: Callable[[], None], rank: int, timeout_s: float, words: str
) -> None:
    plan, settings = training.plan(ranks=2), training.settings(tmp_path / "hurt", timeout_s=timeout_s)
    heard = tmp_path / "heard"

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            heard.touch()

    with pytest.raises(WorkersFailedError, match=words) as caught:
        _train(plan, settings, adapt=_at_epoch(action, heard, rank=rank), on_event=hear)
    assert (caught.value.exit_code, caught.value.rank) == (6, rank)
    result = _result(tmp_path / "hurt")
    assert (result["exit_code"], result["status"], result["rank"]) == (6, "failed", rank)
    assert words in result["message"]
    assert "\n" not in result["message"]
    assert [e["epoch"] for e in result["epochs"]] == [0]
    assert _tidy(tmp_path / "hurt")
    result, _ = _train(plan, dataclasses.replace(settings, resume=True, timeout_s=120.0))
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    if rank == 0:
        _train(plan, training.settings(tmp_path / "whole"))
        _assert_equal(_state(tmp_path / "hurt"), _state(tmp_path / "whole"), exact=True)


def test_a_damaged_checkpoint_is_passed_over_aloud_and_none_at_all_is_7(tmp_path: Path) -> None:
    plan, settings = training.plan("logistic"), training.settings(tmp_path, epochs=2, resume=True)
    with pytest.raises(NoCheckpointError):
        _train(plan, settings)
    assert _result(tmp_path)["exit_code"] == 7
    _train(plan, dataclasses.replace(settings, resume=False))
    newest = checkpoint.find(tmp_path / outdir.CHECKPOINTS).path
    (newest / checkpoint.MODEL).write_bytes(b"")
    result, events = _train(plan, settings)
    notes = [e["message"] for e in _of(events, "note")]
    assert "skipped checkpoint step_00000012" in notes[0]
    assert notes[1] == "continuing after step 6 (step_00000006)"
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    again, events = _train(plan, settings)
    assert again["epochs"] == result["epochs"], "a finished run stays as it is"
    assert again["checkpoint"] == result["checkpoint"] is not None
    assert "all 2 epochs are done" in _of(events, "note")[0]["message"]


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    plan, settings = training.plan("logistic"), training.settings(tmp_path, epochs=1)
    _train(plan, settings)
    resumed = dataclasses.replace(settings, resume=True, epochs=2)
    refusals: list[tuple[Plan, TrainSettings, type[Exception], str]] = [
        (plan, settings, UsageError, "contains a run"),
        (training.plan("cnn"), resumed, InvalidInputError, "the checkpoint is of logistic"),
        (
            dataclasses.replace(plan, model_fingerprint="0" * 16),
            resumed,
            InvalidInputError,
            "another input, number of cl",
        ),
        (plan, dataclasses.replace(resumed, seed=1), UsageError, "made with seed 0, this run has 1"),
        (plan, dataclasses.replace(resumed, optimizer="adamw"), UsageError, "made with optimizer sgd"),
        (dataclasses.replace(plan, num_classes=9), resumed, UsageError, "has 10 classes, the model has 9"),
        (dataclasses.replace(plan, device_type="cuda"), resumed, UnavailableError, "needs 1 CUDA device"),
    ]
    if torch.cuda.device_count():
        refusals.pop()
    before = _state(tmp_path)
    for other, how, error, words in refusals:
        with pytest.raises(error, match=words):
            _train(other, how)
    _assert_equal(_state(tmp_path), before, exact=True)


def test_a_disk_that_fills_up_ends_all_ranks_with_5_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save_file

    def full(named: dict[str, torch.Tensor], path: Path) -> None:
        if "00000012" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(named, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UnavailableError, match=r"cannot save step 12 .*: No space left on device"):
        _train(training.plan(ranks=2), training.settings(tmp_path))
    assert _result(tmp_path)["exit_code"] == 5
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.step == 6
    assert _tidy(tmp_path)
    monkeypatch.setattr(outdir.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(UnavailableError, match="MiB free, 3 checkpoints need"):
        _train(training.plan("logistic", ranks=2), training.settings(tmp_path / "small"))


def test_a_loss_that_explodes_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailedError, match=r"loss is no(t| longer) finite .*; lower the learning rate with --lr"):
        _train(training.plan(ranks=2), training.settings(tmp_path, lr=1e30, warmup=0.0))
    assert _result(tmp_path)["exit_code"] == 6


def test_a_plan_for_more_ranks_than_cores_runs_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.executor.running import prepare

    monkeypatch.setattr(prepare, "usable_cores", lambda: 1)
    _, events = _train(training.plan("logistic", ranks=2), training.settings(tmp_path, epochs=1))
    assert _of(events, "note")[0]["message"].startswith("2 ranks share 1 cores")


def test_under_a_launcher_every_rank_calls_train(tmp_path: Path) -> None:
    plan = training.plan(ranks=2)
    _train(plan, training.settings(tmp_path / "own"))

    def launched(rank: int) -> tuple[dict[str, Any], int]:
        result, events = _train(plan, training.settings(tmp_path / "launched"))
        return result, len(events)

    (result, heard), (other, nothing) = run_ranks(2, launched, threads=1, timeout_s=120)
    assert result == _result(tmp_path / "launched")
    assert heard > 5
    assert (other, nothing) == ({"exit_code": 0}, 0)
    _assert_equal(_state(tmp_path / "launched"), _state(tmp_path / "own"), exact=True)

    def wrong(rank: int) -> str:
        names = []
        for ask, out in ((training.plan(ranks=1), "wrong"), (plan, "launched")):
            try:
                _train(ask, training.settings(tmp_path / out))
            except UsageError as error:
                names.append(str(error))
        resumed = training.settings(tmp_path / "launched", resume=True, epochs=3)
        done, _ = _train(plan, resumed)
        return f"{names[0]}|{names[1]}|{done['exit_code']}"

    for text in run_ranks(2, wrong, threads=1, timeout_s=120):
        assert "the plan is for 1 ranks, the launcher started 2" in text
        assert "contains a run, up to step_00000012" in text, "rank 0's refusal is everyone's"
        assert text.endswith("|0")
    assert [e["epoch"] for e in _result(tmp_path / "launched")["epochs"]] == [0, 1, 2]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    def launched(rank: int) -> tuple[str, int]:
        def stop() -> None:
            while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

        if rank == 1:
            threading.Thread(target=stop).start()
        try:
            _train(training.plan(ranks=2), training.settings(tmp_path, epochs=500, log_every=1))
        except PreemptedError as error:
            return str(error), error.exit_code
        return "", 0

    (first, code), (second, other) = run_ranks(2, launched, threads=1, timeout_s=120, limit_s=300)
    assert (code, other) == (75, 75)
    assert first.split(",")[0] == second.split(",")[0] != ""


def test_a_rank_that_hangs_inside_a_step_is_found_too(tmp_path: Path) -> None:
    def stuck(executor: Executor, epochs: range, announce: Any) -> Iterator[EpochRecord]:
        real = worker.fetch

        def fetch(images: Any, indices: torch.Tensor, **options: Any) -> Any:
            if dist.get_rank() == 1 and options["train"] and options["epoch"] == 1:
                time.sleep(60)
            return real(images, indices, **options)

        worker.fetch = fetch  # type: ignore[assignment]
        return adapt(executor, epochs, announce)

    # Found by the timeout of the plan's own groups: under a longer one the sleeper comes back and the run ends well.
    with pytest.raises(WorkersFailedError, match="rank 1 of 2 hung"):
        _train(training.plan(ranks=2), training.settings(tmp_path, timeout_s=6.0), adapt=stuck)
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.step == 6


def test_states_that_checkpoints_do_not_keep_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.nn.Linear, "get_extra_state", lambda _: 1, raising=True)
    plan = training.plan("logistic")
    _, events = _train(plan, training.settings(tmp_path, epochs=1, steps_per_epoch=1))
    notes = [e["message"] for e in _of(events, "note")]
    assert any("checkpoints do not keep" in note and "_extra_state (get_extra_state)" in note for note in notes)
