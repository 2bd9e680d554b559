"""``ASA_FAULT``: what it understands, and that runs survive what it does; requests to stop that come early or late."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asa.errors import PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.executor.model.votes import Votes
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.stopping import PATIENCE_S, Patience
from asa.interfaces.executor import Executor
from asa.ir.measurements import EpochRecord
from asa.launch import faults, run_ranks
from asa.launch.forking import fork_beside_threads
from asa.scheduler import Announce, Policy, adapt
from asa.strategies import offered
from planner_tests import training
from planner_tests.promising import Promising


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode@rank=0", "'explode' is no kind of fault; there is exception"),
        ("kill@rank=x", "invalid literal"),
        ("kill@color=red", "'color=red' is none of rank="),
        ("kill@point=nowhere", "'nowhere' is no point; there is rendezvous"),
        ("signal:TERM", "'TERM' is no signal"),
        ("hang:long", "could not convert"),
    ],
)
def test_what_cannot_be_understood_is_said(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        faults.arm(text)


def test_conditions_hold_together_and_once_is_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("RANK", "1")
    faults.arm(f"exception:boom@rank=1,step=1,point=data,once={tmp_path / 'once'};memory@step=9;disk@rank=0")
    for step in (0, 1, 2):
        faults.at_step(step)
        faults.reached("forward")
        if step == 1:
            with pytest.raises(RuntimeError, match="boom"):
                faults.reached("data")
        faults.reached("data")  # the second time at step 1
    assert (tmp_path / "once").read_text() == "exception on rank 1 at data, step 1\n"
    assert capsys.readouterr().err == "asa: ASA_FAULT: exception on rank 1 at data, step 1\n"
    faults.at_step(9)
    with pytest.raises(MemoryError):
        faults.reached("validation")


def _train(out: Path, **changes: Any) -> Any:
    """The result."""
    return train(
        training.plan(ranks=2), training.settings(out, **changes), strategies=offered(), adapt=adapt
    )  # fmt: skip


def _state(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.find(out / outdir.CHECKPOINTS).path, checkpoint.MODEL)


@pytest.mark.parametrize(
    ("fault", "error", "words", "saved"),
    [
        ("kill@rank=1,point=validation,step=11", WorkersFailedError, "rank 1 of 2 was killed", 6),
        ("exit:3@rank=0,point=checkpoint.commit,step=11", WorkersFailedError, "rank 0 of 2 exited with code 3", 6),
        ("kill@rank=0,point=checkpoint.renamed,step=11", WorkersFailedError, "rank 0 of 2 was killed", 12),
        ("disk@point=checkpoint.files,step=11", UnavailableError, "cannot save step 12", 6),
        ("exception@rank=1,point=rendezvous", WorkersFailedError, "rank 1 of 2 failed with RuntimeError", None),
    ],
    ids=["validation", "commit", "renamed", "disk", "rendezvous"],
)
def test_whatever_happens_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception], words: str, saved: int | None
) -> None:
    monkeypatch.setenv(faults.VARIABLE, fault)
    (tmp_path / "result.json").write_text("of an earlier run")
    with pytest.raises(error, match=words):
        _train(tmp_path, epochs=3)
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] in (5, 6)
    folder = tmp_path / outdir.CHECKPOINTS
    if saved is None:
        assert not folder.exists()
        return
    assert checkpoint.find(folder).manifest.step == saved
    assert not [p for p in folder.iterdir() if ".tmp" in p.name or ".old" in p.name]
    monkeypatch.delenv(faults.VARIABLE)
    result = _train(tmp_path, epochs=3, resume=True)
    assert [e["epoch"] for e in result["epochs"]] == [0, 1, 2], "also that of an epoch whose checkpoint came last"


def test_a_request_to_stop_that_comes_while_starting_saves_nothing_and_the_run_begins_anew(tmp_path: Path) -> None:
    with fork_beside_threads():
        pid = os.fork()
    if not pid:  # a process with one thread, like a command that has just begun
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            os.kill(os.getpid(), signal.SIGTERM)
            _train(tmp_path)
        except PreemptedError as error:
            code = error.exit_code if str(error).startswith("stopped on request before the first step") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert not list(tmp_path.glob("checkpoints/*"))
    assert [e["epoch"] for e in _train(tmp_path)["epochs"]] == [0, 1]
    _train(tmp_path / "whole")
    assert all(torch.equal(v, _state(tmp_path / "whole")[n]) for n, v in _state(tmp_path).items())


def test_a_request_to_stop_in_a_validation_is_answered_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"term@rank=1,point=validation,step=5,once={tmp_path / 'once'}")
    with pytest.raises(PreemptedError, match="after step 6"):
        _train(tmp_path)
    log = [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log.index("checkpoint") < log.index("epoch"), "saved before the validation was through"
    monkeypatch.delenv(faults.VARIABLE)
    assert [e["epoch"] for e in _train(tmp_path, resume=True)["epochs"]] == [0, 1]


@pytest.mark.parametrize("point", ["replan.agree", "replan.build", "replan.move", "replan.swap"])
def test_a_change_of_plan_that_ends_the_run_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    small, better = training.plan(ranks=2, step_s=1e-6), training.plan(ranks=2, split=("classifier",), step_s=1e-7)
    small = dataclasses.replace(small, certificate=dataclasses.replace(small.certificate, lower_bound_s=1e-8))
    training.clocked(monkeypatch, lambda _: 100.0)  # so long that any change pays, however long it takes

    def changing(executor: Executor, epochs: range, announce: Announce) -> Iterator[EpochRecord]:
        """From the second epoch on: the first one's checkpoint is there."""
        yield from adapt(executor, range(epochs.start, 1), announce)
        model, policy = Promising(better), Policy(rebuild_s=0.0, patience=0.0)
        yield from adapt(executor, range(max(1, epochs.start), epochs.stop), announce, model=model, policy=policy)

    longer = {"steps_per_epoch": 15, "keep": 8}  # a plan is left only once its own step time is known
    monkeypatch.setenv(faults.VARIABLE, f"kill@rank=1,point={point}")
    with pytest.raises(WorkersFailedError, match="rank 1 of 2 was killed"):
        train(small, training.settings(tmp_path, epochs=8, **longer), strategies=offered(), adapt=changing)
    assert (tmp_path / outdir.CHECKPOINTS / "step_00000015").is_dir()
    monkeypatch.delenv(faults.VARIABLE)
    saved = checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.step // 15
    again = _train(tmp_path, resume=True, epochs=saved + 1, **longer)
    assert [e["epoch"] for e in again["epochs"]] == list(range(saved + 1))


def test_patience_in_a_validation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, saved = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    patience = Patience(Votes(), lambda: now[0] > 3, lambda: saved.append(now[0]))
    answers = []
    for _ in range(20):
        now[0] += 1.0
        answers.append(patience.exhausted())
    assert saved == [4.0]
    assert answers.index(True) == 4 + int(PATIENCE_S), "the first over the limit"


def _slow(rank: int, wrong: bool) -> int:
    votes, looks = Votes(120.0), list[bool]()
    usual = votes.everyone

    def everyone(yes: bool) -> bool:
        looks.append(yes)
        return usual(yes)

    def act() -> int:
        if wrong and rank == 1:
            raise UsageError("wrong")
        until = time.monotonic() + 60.0
        while rank == 0 and len(looks) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        return rank if rank or len(looks) >= 6 else -1

    votes.everyone = everyone  # type: ignore[method-assign]
    votes._timeout_s = 0.4  # they meet four times in it; the limit of their group stays
    return votes.patiently(act)


def test_ranks_wait_for_one_that_works_longer_than_the_timeout() -> None:
    """It takes more than the four meetings of one timeout."""
    assert run_ranks(2, _slow, False, threads=1, timeout_s=120) == [0, 1]
    with pytest.raises(UsageError, match="wrong"):
        run_ranks(2, _slow, True, threads=1, timeout_s=120)


def test_a_metric_that_is_no_number_is_said_so_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(
        "import torch\ndef metric():\n    return lambda outputs, labels: torch.full((len(labels),), float('nan'))\n"
    )
    result = _train(tmp_path / "run", metric="strange:metric")
    assert [e["validation_accuracy"] for e in result["epochs"]] == [None, None]
    assert "strange:metric is nan over the" in (tmp_path / "run" / "log.jsonl").read_text()


def test_a_settings_timeout_reaches_the_command() -> None:
    from asa.cli.commands.train import VERBS

    (option,) = [o for o in VERBS[0].options if o.name == "timeout"]
    (field,) = [f for f in dataclasses.fields(training.settings(Path())) if f.name == "timeout_s"]
    assert option.default == field.default == 300.0
