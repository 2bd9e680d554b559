"""Ranks that are lost: noticed whether anybody waits for them or not, started again, and at last done without."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

import asa
from asa.cli.replanning import regroup as planned_again
from asa.errors import InfeasibleError, PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.executor.running import outdir
from asa.executor.running.member import Job
from asa.executor.running.rank_losses import RankLosses
from asa.executor.running.run import train
from asa.executor.training import checkpoint, worker
from asa.executor.training.logs import RunLog
from asa.executor.training.worker import Worker
from asa.ir import codec
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.launch import alive, devices, faults
from asa.launch.forking import fork_beside_threads
from asa.launch.ranks import run_ranks
from asa.report.text.training import replan_line
from asa.scheduler import adapt
from asa.strategies import offered


def _run(out: Path, *, model: str = "logistic", ranks: int = 2, regroup: Any = None, **changes: Any) -> dict[str, Any]:
    plan, settings = training.plan(model, ranks=ranks), training.settings(out, **changes)
    return train(plan, settings, strategies=offered(), adapt=adapt, regroup=regroup)


def _fewer(plan: Plan, ranks: int) -> Plan:
    return training.plan(plan.model_spec, ranks=ranks)


def _state(out: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.find(out / outdir.CHECKPOINTS).path
    return checkpoint.read(path, checkpoint.MODEL) | checkpoint.read(path, checkpoint.OPTIMIZER)


def _log(out: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [e for e in events if e["event"] == kind]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_ranks_that_nobody_waits_for_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, fault: str
) -> None:
    """The only one, or all at once in their data."""
    usual = alive.Watch
    monkeypatch.setenv(faults.VARIABLE, f"{fault}@point=data,step=3")
    monkeypatch.setattr(alive, "Watch", lambda counters, _, **options: usual(counters, 1.0, **options))
    with pytest.raises(WorkersFailedError, match=rf"rank \d of {ranks} hung: it gave no sign of life for") as caught:
        _run(tmp_path, ranks=ranks)
    assert caught.value.lost
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["exit_code"], result["rank"]) == (6, caught.value.rank)


@pytest.mark.parametrize(("step", "exit_code"), [(2, 6), (8, 75)])
def test_a_run_that_was_asked_to_stop_is_not_started_again_for_a_lost_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, exit_code: int
) -> None:
    """The first checkpoint is that of step 6."""
    usual = worker.played

    def lost_while_stopping(model: Any, samples: Any, now: int, *args: Any, **kwargs: Any) -> Any:
        if now == step and model.rank == 1:
            asked: list[int] = []
            signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
            os.kill(os.getppid(), signal.SIGTERM)
            while not asked:  # the launcher passes it on
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(model, samples, now, *args, **kwargs)

    monkeypatch.setattr(worker, "played", lost_while_stopping)
    kind = PreemptedError if exit_code == 75 else WorkersFailedError
    line = "stopped on request, but rank 1 of 2 was killed .* the newest checkpoint is of step 6"
    with pytest.raises(kind, match=line if exit_code == 75 else "rank 1 of 2 was killed"):
        _run(tmp_path, regroup=_fewer)
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == exit_code
    assert _log(tmp_path, "checkpoint")[-1]["step"] == 6 if exit_code == 75 else not _log(tmp_path, "checkpoint")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_slower_than_the_timeout_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    flush = checkpoint._flush

    def slow_flush(path: Path) -> None:
        if path.name == checkpoint.MODEL:
            time.sleep(8.0)  # longer than the timeout, and than a rank may be silent under it
        flush(path)

    monkeypatch.setattr(checkpoint, "_flush", slow_flush)
    result = _run(tmp_path, ranks=ranks, epochs=1, timeout_s=5.0)
    assert result["exit_code"] == 0
    assert len(_log(tmp_path, "checkpoint")) == 1


def test_a_disk_that_never_answers_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_flush", lambda _path: time.sleep(1000.0))
    monkeypatch.setattr("asa.executor.training.checkpointer._MOST_TIMEOUTS", 1)
    with pytest.raises(UnavailableError, match=r"has not stored the files within \d+ s"):
        _run(tmp_path, epochs=1, timeout_s=5.0)


def test_silence_is_counted_in_the_watchers_own_time_and_against_what_was_slow_before() -> None:
    now, counters = [0.0], [1, 1, 0]
    watch = alive.Watch(counters, 10.0, clock=lambda: now[0])

    def wait(seconds: float, beating: tuple[int, ...] = ()) -> tuple[int, float] | None:
        found = None
        for _ in range(round(seconds / 0.5)):
            now[0] += 0.5
            for rank in beating:
                counters[rank] += 1
            found = found or watch.late(range(3))
        return found

    assert wait(11.0, (0,)) is None
    counters[1] += 1
    now[0] += 3600.0  # it was stopped itself
    assert watch.late(range(3)) is None
    assert wait(30.0, (0,)) is None, "three times the 11 s after which rank 1 came back"
    assert wait(5.0, (0,)) == (1, pytest.approx(33.5, abs=2))
    assert wait(1000.0, (0, 1)) is None, "a rank is looked at from its first sign on"
    assert counters[2] == 0


def test_a_rank_alone_that_beats_is_left_in_peace() -> None:
    def slowly(_rank: int) -> int:
        for _ in range(20):
            alive.beat()
            time.sleep(0.1)
        return 7

    assert run_ranks(1, slowly, threads=1, timeout_s=120, silence_s=0.3) == [7]


def test_counters_are_shared_with_processes_started_later() -> None:
    context = multiprocessing.get_context("fork")
    counters = alive.shared_counters(context, 2)
    process = context.Process(target=_beat_twice, args=(counters,))
    with fork_beside_threads():
        process.start()
    process.join(120)
    assert list(counters) == [0, 2]


def _beat_twice(counters: Any) -> None:
    alive.count_in(counters, 1)
    alive.beat()
    alive.beat()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a run leaves that nothing happens to."""
    out = tmp_path_factory.mktemp("calm")
    _run(out)
    return _state(out)


@pytest.mark.parametrize("kind", ["kill", "exit:3", "exception", "hang"])
def test_a_loss_is_answered_once_on_the_same_plan_and_costs_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, calm: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"{kind}@rank=1,point=optimizer,step=9,once={tmp_path / 'once'}")
    result = _run(tmp_path / "run", regroup=_fewer, timeout_s=5.0 if kind == "hang" else 120.0)
    assert result["exit_code"] == 0
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    (said,) = [n["message"] for n in _log(tmp_path / "run", "note") if "started again" in n["message"]]
    assert said.startswith("rank 1 of 2 ")
    assert not _log(tmp_path / "run", "replan")
    found = _state(tmp_path / "run")
    assert all(torch.equal(found[name], value) for name, value in calm.items())


def test_a_rank_lost_for_good_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=1,point=backward,step=9")
    asked: list[int] = []

    def fewer(plan: Plan, ranks: int) -> Plan:
        asked.append(ranks)
        return _fewer(plan, ranks)

    result = _run(tmp_path / "run", regroup=fewer)
    assert (result["exit_code"], asked) == (0, [1])
    assert [e["measurements"]["num_ranks"] for e in result["epochs"]] == [2, 1]
    (event,) = _log(tmp_path / "run", "replan")
    assert (event["kind"], event["rank"], event["ranks_before"], event["ranks"]) == ("lost", 1, 2, 1)
    line = replan_line(event)
    assert "on 1 rank instead of 2): rank 1 of 2 was killed" in line
    assert "\n" not in line
    assert codec.load(Plan, tmp_path / "run" / "plan.json").num_ranks == 1
    assert result["plan_fingerprint"] == event["new"]
    # The same samples, each once, in the same steps: only the order of additions differs.
    found = _state(tmp_path / "run")
    assert all(torch.allclose(found[n], v, rtol=1e-4, atol=1e-6) for n, v in calm.items() if v.is_floating_point())


def _member(_rank: int, out: Path, epochs: int, count: str, resume: bool) -> int:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = count
    plan, settings = training.plan("logistic", ranks=2), training.settings(out, epochs=epochs, resume=resume)
    try:
        found = train(plan, settings, strategies=offered(), adapt=adapt, regroup=_fewer)
    except UsageError as error:
        return error.exit_code
    return int(found["exit_code"])


def test_what_a_launcher_starts_with_fewer_ranks_and_then_with_all_goes_on(tmp_path: Path) -> None:
    assert run_ranks(1, _member, tmp_path, 1, "0", False, threads=1, timeout_s=120) == [2], "a new run is as planned"
    assert run_ranks(2, _member, tmp_path, 1, "0", False, threads=1, timeout_s=120) == [0, 0]
    assert run_ranks(1, _member, tmp_path, 2, "1", False, threads=1, timeout_s=120) == [0]
    assert run_ranks(2, _member, tmp_path, 3, "0", True, threads=1, timeout_s=120) == [0, 0]
    (event,) = [e for e in _log(tmp_path, "replan") if e["ranks"] == 1]
    assert (event["kind"], event["ranks_before"], event["why"]) == ("lost", 2, "1 ranks are here now")
    assert codec.load(Plan, tmp_path / "plan.json").num_ranks == 2
    epochs = _log(tmp_path, "epoch")
    assert [(e["epoch"], e["measurements"]["num_ranks"]) for e in epochs] == [(0, 2), (1, 1), (2, 2)]


def _four(_rank: int, out: Path) -> int:
    """Exit code of a run that a launcher starts again on all four ranks for its third epoch."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    plan, settings = training.plan("logistic", ranks=4, batch=48), training.settings(out, epochs=3, resume=True)
    found = train(plan, settings, strategies=offered(), adapt=adapt, regroup=lambda p, n: _of_48(p.model_spec, n))
    return int(found["exit_code"])


def _of_48(model: str, ranks: int) -> Plan:
    return training.plan(model, ranks=ranks, batch=48)


def test_four_ranks_then_three_then_four_use_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank writes down what it reads: the last attempt at each step reads its batch, each sample once."""
    plan, run = _of_48("logistic", 4), tmp_path / "run"
    honest = Worker._fetch

    def noted(self: Worker, images: Any, indices: torch.Tensor, epoch: int) -> Any:
        read = worker._rows_read(indices, worker.microbatch_rows(self.model, len(indices)))
        line = [time.monotonic(), dist.get_world_size(), epoch, indices.tolist(), read.tolist()]
        with (tmp_path / f"read.{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return honest(self, images, indices, epoch)

    monkeypatch.setattr(Worker, "_fetch", noted)
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=3,point=backward,step=9")
    fewer = train(
        plan, training.settings(run), strategies=offered(), adapt=adapt, regroup=lambda p, n: _of_48(p.model_spec, n)
    )
    assert (fewer["exit_code"], [e["measurements"]["num_ranks"] for e in fewer["epochs"]]) == (0, [4, 3])
    monkeypatch.delenv(faults.VARIABLE)
    assert run_ranks(4, _four, run, threads=1, timeout_s=120) == [0] * 4
    assert [e["measurements"]["num_ranks"] for e in _log(run, "epoch")] == [4, 3, 4]

    steps: dict[tuple[int, tuple[int, ...]], list[tuple[float, int, list[int]]]] = {}
    for file in tmp_path.glob("read.*"):
        for at, ranks, epoch, batch, read in map(json.loads, file.read_text().splitlines()):
            steps.setdefault((epoch, tuple(batch)), []).append((at, ranks, read))
    assert [sum(epoch == e for epoch, _ in steps) for e in range(3)] == [6, 6, 6]
    for (_, batch), reads in steps.items():
        last = sorted(reads)[-sorted(reads)[-1][1] :]
        assert sorted(sample for _, _, read in last for sample in read) == sorted(batch)
    for e in range(3):
        samples = [sample for epoch, batch in steps if epoch == e for sample in batch]
        assert len(set(samples)) == len(samples) == 6 * 48


@pytest.mark.parametrize(
    ("losses", "starts", "ends"),
    [
        ([(0, 9), (0, 9)], 1, "fewer"),  # (rank, step)
        ([(i % 2, 9) for i in range(21)], 20, "fewer"),
        ([(0, 9), (0, 12), (0, 7)], 3, ""),
        ([(0, i) for i in range(21)], 20, "fewer"),
    ],
    ids=["the same", "either", "elsewhere", "elsewhere for ever"],
)
def test_ranks_lost_by_chance_are_started_again_and_one_lost_for_good_is_not(
    tmp_path: Path, losses: list[tuple[int, int]], starts: int, ends: str
) -> None:
    log = RunLog(tmp_path)
    plan, settings = training.plan("logistic", ranks=2), training.settings(tmp_path)
    job = Job(plan=plan, settings=settings, strategies=offered(), adapt=_no_epochs, device_type="cpu")
    answers, seen = RankLosses(_fewer), []
    for rank, step in losses:
        failure = WorkersFailedError(f"rank {rank} of 2 was killed", rank=rank, step=step, signal=9, lost=True)
        seen.append(answers.next_job(job, job.plan, failure, log).plan.num_ranks)
    assert seen == [2] * starts + ([1] if ends else [])


def test_a_rank_that_is_killed_twice_in_one_step_by_chance_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = iter([5, 8, 8])  # the step of the newest checkpoint at each loss
    monkeypatch.setattr(checkpoint, "newest_step", lambda _folder: next(saved))
    plan, settings = training.plan("logistic", ranks=2), training.settings(tmp_path)
    job = Job(plan=plan, settings=settings, strategies=offered(), adapt=_no_epochs, device_type="cpu")
    answers, seen, log = RankLosses(_fewer), [], RunLog(tmp_path)
    for _ in range(3):
        failure = WorkersFailedError("rank 0 of 2 was killed", rank=0, step=9, signal=9, lost=True)
        seen.append(answers.next_job(job, job.plan, failure, log).plan.num_ranks)
    assert seen == [2, 2, 1]


def test_a_rank_that_a_plan_left_out_for_a_while_is_there_again_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaving_out(executor: Any, epochs: range, announce: Any) -> Iterator[Any]:
        for record in adapt(executor, epochs, announce):
            if record.epoch == 0:
                old, alone = executor.plan, training.plan("logistic", ranks=1)
                executor.migrate(alone, (0,))
                announce(
                    {
                        "event": "replan", "kind": "switch", "epoch": 0, "step": record.step, "old": fingerprint(old),
                        "new": fingerprint(alone), "why": "rank 1 is slow", "rung": "fewer", "processes": [0],
                        "predicted_gain": 0.5, "predicted_seconds": 1.0, "seconds": 1.0, "batch_norm": None,
                    }
                )  # fmt: skip
            yield record

    monkeypatch.setenv(faults.VARIABLE, f"kill@rank=0,step=14,point=forward,once={tmp_path / 'once'}")
    settings = training.settings(tmp_path / "run", epochs=3)
    plan = training.plan("logistic", ranks=2)
    result = train(plan, settings, strategies=offered(), adapt=leaving_out, regroup=_fewer)
    assert result["exit_code"] == 0
    assert [e["epoch"] for e in result["epochs"]] == [0, 1, 2]
    assert [e["measurements"]["num_ranks"] for e in result["epochs"]] == [2, 1, 2]


def _no_epochs(*_: Any) -> Iterator[Any]:
    return iter(())


def _infeasible(_plan: Plan, _ranks: int) -> Plan:
    raise InfeasibleError("nothing fits")


@pytest.mark.parametrize(
    ("fault", "ranks", "regroup", "words"),
    [
        ("kill@rank=0,step=9,point=forward", 1, _fewer, "rank 0 of 1 was killed"),
        ("exception:boom@rank=1,step=9,point=forward", 2, _fewer, "failed with RuntimeError: boom"),
        ("kill@rank=1,step=9,point=forward", 2, _infeasible, "rank 1 of 2 was killed"),
        ("kill@rank=1,step=9,point=forward", 2, None, "rank 1 of 2 was killed"),
    ],
    ids=["alone", "exception", "infeasible", "off"],
)
def test_what_cannot_be_answered_ends_the_run_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, ranks: int, regroup: Callable[..., Plan] | None,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(faults.VARIABLE, fault)
    with pytest.raises(WorkersFailedError, match=words) as caught:
        _run(tmp_path, ranks=ranks, regroup=regroup)
    assert caught.value.exit_code == 6
    again = [n for n in _log(tmp_path, "note") if "started again" in n["message"]]
    # Killed ranks are tried once more, because a newer state was saved in between.
    assert len(again) == (0 if regroup is None else 2 if "kill" in fault else 1), "not for ever"


def test_a_loss_that_no_start_mends_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkersFailedError, match="no longer finite"):
        _run(tmp_path, regroup=_fewer, lr=1e30)
    assert not [n for n in _log(tmp_path, "note") if "started again" in n["message"]]


def test_losses_far_apart_are_answered_each_on_the_same_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults_at = ";".join(
        f"kill@rank={step % 2},point=data,step={step},once={tmp_path / str(step)}" for step in (3, 8, 14)
    )
    monkeypatch.setenv(faults.VARIABLE, faults_at)
    result = _run(tmp_path / "run", regroup=_infeasible, epochs=3)
    assert result["exit_code"] == 0
    assert len([n for n in _log(tmp_path / "run", "note") if "started again" in n["message"]]) == 3


def test_checkpoints_by_time_bound_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path / "calm", epochs=1, steps_per_epoch=20)
    monkeypatch.setenv(faults.VARIABLE, f"kill@rank=1,point=optimizer,step=15,once={tmp_path / 'once'}")
    often = {"epochs": 1, "steps_per_epoch": 20, "save_every_s": 1e-6}
    with pytest.raises(WorkersFailedError):
        _run(tmp_path / "run", **often)
    found = checkpoint.find(tmp_path / "run" / outdir.CHECKPOINTS).manifest
    assert 10 <= found.step <= 15, "of an epoch of 20 steps"
    assert found.position == found.step * 64
    result = _run(tmp_path / "run", resume=True, **often)
    assert [e["epoch"] for e in result["epochs"]] == [0]
    calm, again = _state(tmp_path / "calm"), _state(tmp_path / "run")
    assert all(torch.equal(again[name], value) for name, value in calm.items())
    _run(tmp_path / "never", epochs=1, steps_per_epoch=20)
    assert len(_log(tmp_path / "never", "checkpoint")) == 1 < len(_log(tmp_path / "run", "checkpoint"))


def test_a_job_saves_by_time_too(tmp_path: Path) -> None:
    def job(out: Path, save_every: float | str | None, resume: bool = False) -> asa.Job:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(12)]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return asa.Job(
            net, optimizer, batches, torch.nn.functional.cross_entropy, out=out, resume=resume, log_every=1,
            save_every=save_every, cache=None,
        )  # fmt: skip

    whole = job(tmp_path / "whole", None)
    whole.run(1)
    faults.arm("exception:gone@point=optimizer,step=7")
    broken = job(tmp_path / "run", "0.000001s")
    faults.arm("exception:gone@point=optimizer,step=7")
    with pytest.raises(RuntimeError, match="gone"):
        broken.run(1)
    broken.close()
    faults.arm("")
    again = job(tmp_path / "run", "10m", resume=True)
    assert (again.step, again.epoch) == (7, 0)
    again.run(1)
    assert again.step == 12
    assert all(torch.equal(v, again.state_dict()[n]) for n, v in whole.state_dict().items())
    for wrong, out in (("10 parsecs", tmp_path / "x"), (0, tmp_path / "x"), (5.0, None)):
        with pytest.raises(UsageError, match="save_every"):
            asa.Job(torch.nn.Linear(4, 3), None, [], None, out=out, save_every=wrong)  # type: ignore[arg-type]
    whole.close()
    again.close()


def test_a_device_left_out_is_the_lost_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7,6")
    devices.leave_device_out(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "cuda_devices", lambda: 3)
    devices.leave_device_out(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_the_real_planner_makes_the_plan_for_the_ranks_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nouns
    from refusals import user_folder

    from asa.cli.console import Console
    from asa.planner import Request
    from asa.planner import plan as solve

    user_folder(tmp_path, monkeypatch)
    made = solve(nouns.profile(), nouns.cluster(), offered(), Request(gpus=2, global_batch=8, strategies=("ddp",)))[0]
    fewer = planned_again(Console(), made, 1)
    assert (fewer.num_ranks, fewer.global_batch) == (1, made.global_batch)
    assert fewer.model_fingerprint == made.model_fingerprint


def test_sigstop_of_one_of_two_is_named_by_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "stop@rank=1,point=data,step=3")
    with pytest.raises(WorkersFailedError, match="rank 1 of 2 hung") as caught:
        _run(tmp_path, timeout_s=5.0)
    assert caught.value.lost
