"""Workers that do not wait for one another: a lost one is not missed, and any plan goes on from where they end."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training

from asa.errors import PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.prefetch import Prefetcher
from asa.ir.consistency import parse
from asa.ir.plan import Plan
from asa.launch import faults
from asa.scheduler import adapt
from asa.strategies import offered


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody that a busy machine keeps from its core is late: who is lost was killed."""
    for name in ("star._LATE_S", "star._LATE_TO_MEET_S", "server._SILENT_S"):
        monkeypatch.setattr(f"asa.executor.consistency.{name}", 1e9)


def under(text: str, ranks: int) -> Plan:
    discipline = parse(text)
    workers = discipline.workers(ranks)
    return replace(
        training.plan("logistic", ranks=workers, batch=60), gpus=ranks, strategy=text, consistency=discipline
    )


def run(plan: Plan, out: Path, **changes: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    settings = training.settings(out, **({"steps_per_epoch": 5, "observe": False} | changes))
    result = train(plan, settings, strategies=offered(), adapt=adapt, on_event=events.append)
    assert result["exit_code"] == 0
    return events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def test_a_killed_worker_is_not_missed_and_data_parallelism_goes_on_from_there(tmp_path, monkeypatch):
    monkeypatch.setattr("asa.launch.returns.MOST_STARTS", 0)  # it does not come back
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=2,step=1,point=data")
    events = run(under("ps_bounded:window=2", 3), tmp_path)
    assert [e["rank"] for e in of(events, "lost")] == [2]
    counted = of(events, "consistency")
    assert [c["live"] for c in counted] == [[0, 1], [0, 1]]
    last = counted[-1]
    assert last["samples_lost"] in (20, 40)  # the ticket of its step, and the next one, if that was asked for already
    applied = last["servers"][0]["samples_applied"] + last["servers"][0]["samples_rejected"]
    assert applied + last["samples_lost"] == 2 * 5 * 60 == sum(c["samples_handed_out"] for c in counted)
    assert max(map(int, last["servers"][0]["ages"])) <= 2
    monkeypatch.delenv(faults.VARIABLE)
    found = checkpoint.find(tmp_path / "checkpoints")
    assert found.manifest.step == 10
    assert any(key.endswith("momentum_buffer") for key in checkpoint.read(found.path, checkpoint.OPTIMIZER))
    onward = run(training.plan("logistic", ranks=2, batch=60), tmp_path, epochs=3, resume=True)
    assert [e["epoch"] for e in of(onward, "epoch")] == [2]


@pytest.mark.parametrize("text", ["diloco:period=2", "ps_sync:placement=own"])
def test_a_run_under_a_discipline_goes_on_as_if_it_had_not_ended(tmp_path, text):
    plan = under(text, 3 if "own" in text else 2)
    events = run(plan, tmp_path)
    (started,) = of(events, "start")
    assert f"--nproc-per-node {plan.num_processes} " in started["torchrun"]
    whole = of(events, "epoch")
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000010")
    again = of(run(plan, tmp_path, resume=True), "epoch")
    assert [e["epoch"] for e in again] == [1]
    for figure in ("train_loss", "validation_loss"):
        assert again[0][figure] == pytest.approx(whole[1][figure], rel=1e-6)


def test_a_lost_server_is_started_again_from_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, f"kill@rank=0,point=checkpoint.done,once={tmp_path / 'once'}")

    def none_other(plan: Plan, ranks: int) -> Plan:
        raise UsageError("no other")

    events: list[dict[str, Any]] = []
    settings = training.settings(tmp_path, steps_per_epoch=5, observe=False)
    result = train(
        under("ps_async", 2), settings, strategies=offered(), adapt=adapt, on_event=events.append, regroup=none_other
    )
    assert result["exit_code"] == 0
    said = [e["message"] for e in of(events, "note")]
    assert any("all 2 ranks are started again" in line for line in said)
    assert any("step 5" in line for line in said), said
    assert any("momentum 0.4 in place of 0.9" in line for line in said), said
    assert sorted({e["epoch"] for e in of(events, "epoch")}) == [0, 1]


def test_one_worker_alone_has_nobody_to_wait_for_and_writes_its_log(tmp_path):
    events = run(under("ps_async", 1), tmp_path, epochs=1)
    assert [c["live"] for c in of(events, "consistency")] == [[0]]
    assert [0 < e["measurements"]["utilisation"] <= 1 for e in of(events, "epoch")] == [True]
    assert not [e for e in of(events, "note") if "momentum" in e["message"]]
    assert (tmp_path / "log.jsonl").read_text().count('"live": [0]') == 1


@pytest.mark.parametrize("text", ["local_sgd:period=1", "diloco:period=1:outer_rate=1:outer_momentum=0"])
def test_averages_of_every_step_are_data_parallelism_also_with_unequal_workers_and_several_epochs(tmp_path, text):
    plain = training.plan("logistic", ranks=2, batch=9)  # 5 and 4 samples
    averaged = replace(plain, strategy=text, consistency=parse(text))
    losses = [
        [e["train_loss"] for e in of(run(p, tmp_path / str(i), epochs=3), "epoch")]
        for i, p in enumerate((plain, averaged))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(("ranks", "words"), [(1, "learning rate with --lr$"), (2, "or let workers wait more")])
def test_workers_that_do_not_wait_end_inside_an_epoch_whose_loss_is_not_finite(tmp_path, monkeypatch, ranks, words):
    monkeypatch.setattr("asa.executor.running.asynchronous.VOTE_EVERY_S", 0.0)
    monkeypatch.setenv(faults.VARIABLE, "exception:the epoch went on@point=data,step=8")
    with pytest.raises(WorkersFailedError, match=f"no longer finite in epoch 0; lower the .*{words}"):
        run(under("ps_async", ranks), tmp_path, epochs=1, steps_per_epoch=20, lr=1e30)


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_that_do_not_wait_have_their_samples_gathered_ahead(tmp_path, monkeypatch, ranks):
    usual, noted = Prefetcher.take, tmp_path / "taken"

    def take(self: Prefetcher, indices: Any) -> Any:
        found = usual(self, indices)
        with noted.open("a") as file:  # by every rank: a busy machine may leave hardly a step to one of them
            file.write(f"{int(found is not None)}")
        return found

    monkeypatch.setattr(Prefetcher, "take", take)
    whole: list[dict[str, Any]] = []
    for ahead in (False, True):
        if ahead:
            monkeypatch.setattr(Prefetcher, "of", staticmethod(lambda images, _device: Prefetcher(images, pin=False)))
        events: list[dict[str, Any]] = []
        settings = training.settings(tmp_path / str(ahead), steps_per_epoch=5, observe=False)
        noted.write_text("")
        train(under("ps_async", ranks), settings, strategies=offered(), adapt=adapt, on_event=events.append)
        counted = of(events, "consistency")
        assert [c["samples_handed_out"] for c in counted] == [300, 300]
        assert counted[-1]["servers"][0]["samples_applied"] == 600
        whole.append(of(events, "epoch")[-1])
    if ranks == 1:  # an order that does not depend on time
        assert noted.read_text() == "01111" * 2, "all but the first of an epoch"
        assert whole[0]["train_loss"] == whole[1]["train_loss"]
    assert "1" in noted.read_text()


def test_a_request_to_stop_in_a_long_validation_saves_and_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("asa.executor.running.asynchronous.PATIENCE_S", 0.0)
    monkeypatch.setenv(faults.VARIABLE, f"term@rank=1,point=validation,once={tmp_path / 'once'}")
    with pytest.raises(PreemptedError, match="after step 5, saved to"):
        run(under("ps_async", 2), tmp_path, epochs=1)
    assert checkpoint.find(tmp_path / "checkpoints").manifest.step == 5


def test_weights_that_do_not_fit_into_shared_memory_are_refused(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnavailableError, match=r"no memory for \d+ weights .*: No space left on device"):
        run(under("hogwild", 2), tmp_path / "run")


def test_shared_weights_have_no_file_that_a_killed_rank_could_leave_behind(tmp_path, monkeypatch):
    real = tempfile.mkstemp

    def unnamed(*args, prefix="", **options):
        assert "hogwild" not in prefix, "a file with a name was made"
        return real(*args, prefix=prefix, **options)

    monkeypatch.setattr("tempfile.mkstemp", unnamed)
    events = run(under("hogwild", 2), tmp_path, epochs=1)
    assert [e["epoch"] for e in of(events, "epoch")] == [0]


def test_a_request_to_stop_that_only_a_server_got_is_answered_after_the_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, f"term@rank=2,point=checkpoint.begin,once={tmp_path / 'once'}")
    with pytest.raises(PreemptedError, match="after step 10, saved to"):
        run(under("ps_async:placement=own", 3), tmp_path, epochs=4)


@pytest.mark.parametrize("text", ["ps_async", "hogwild"])
def test_a_long_epoch_is_saved_inside_and_goes_on_from_there(tmp_path, text):
    long = {"epochs": 1, "steps_per_epoch": 12, "save_every_s": 1e-6, "keep": 50}
    events = run(under(text, 2), tmp_path, **long)
    steps = [e["step"] for e in of(events, "checkpoint")]
    assert len(steps) > 2
    assert steps == sorted(set(steps))
    assert sum(c["samples_handed_out"] for c in of(events, "consistency")) == 12 * 60
    assert [e["epoch"] for e in of(events, "epoch")] == [0]
    folder = tmp_path / "checkpoints"
    for step in steps[2:]:
        shutil.rmtree(folder / f"step_{step:08d}")
    before = checkpoint.find(folder).manifest.position
    again = run(under(text, 2), tmp_path, resume=True, **long)
    assert of(again, "start")[0]["resumed_step"] == steps[1]
    told = [e["message"] for e in of(again, "note") if "momenta of its own" in e["message"]]
    assert [line.partition(" each of ")[0] for line in told] == (["under hogwild"] if text == "hogwild" else [])
    assert before + sum(c["samples_handed_out"] for c in of(again, "consistency")) == 12 * 60


def test_momenta_of_the_other_workers_are_named_also_where_rank_0_had_made_no_step(tmp_path):
    run(under("hogwild", 2), tmp_path, epochs=1)
    folder = tmp_path / "checkpoints"
    found = checkpoint.find(folder)
    tensors = {checkpoint.MODEL: checkpoint.read(found.path, checkpoint.MODEL), checkpoint.OPTIMIZER: {}}
    later = replace(found.manifest, step=found.manifest.step + 1)
    checkpoint.write(folder, later, tensors, commit=lambda: None)
    (told,) = (
        e["message"] for e in of(run(under("hogwild", 2), tmp_path, resume=True), "note") if "momenta" in e["message"]
    )
    assert "the checkpoint has none, as rank 0 had made no step" in told
