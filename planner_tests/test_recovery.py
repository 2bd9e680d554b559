"""A run that lacks memory: all ranks stop, the memory model is corrected, and another plan goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nouns
import pytest
import torch
import training
import wide_model
from started import started

from asa.cli.replanning import relieve
from asa.cost.machine.estimate import estimate
from asa.cost.machine.what_if import heavier_profile
from asa.cost.memory.peak import reserved
from asa.errors import ExhaustedError, InfeasibleError, WorkersFailedError
from asa.executor.running import exhausted, outdir, recovery
from asa.executor.running.rank_losses import RankLosses
from asa.executor.running.recovery import shortage_line
from asa.executor.running.run import train
from asa.executor.training import checkpoint, worker
from asa.executor.training.checkpointer import Checkpointer
from asa.instruments import memory_limits
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.shortage import Shortage
from asa.launch import run_ranks
from asa.planner import Request
from asa.planner import plan as solve
from asa.report.text.training import replan_line
from asa.scheduler import adapt
from asa.scheduler.memory import corrected
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import trace

DDP = training.plan(ranks=2)
SAME = dataclasses.replace(DDP, notes=("planned again",))
TENSOR = training.plan(ranks=2, split=("classifier",))


def _fails(
    monkeypatch: pytest.MonkeyPatch, steps: set[int], plan: Plan = DDP, error: BaseException | None = None
) -> None:
    """Rank 1 runs out of memory in these steps under ``plan``, between a collective and the next."""
    usual = worker.played

    def hungry(model: Any, samples: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if step in steps and model.rank == 1 and model.plan == plan:
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise error  # type: ignore[misc]
        return usual(model, samples, step, *args, **kwargs)

    monkeypatch.setattr(worker, "played", hungry)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.find(out / outdir.CHECKPOINTS).path, checkpoint.MODEL)


def test_it_goes_on_from_the_checkpoint_and_no_sample_is_lost_or_seen_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(DDP, training.settings(tmp_path / "calm"), strategies=offered(), adapt=adapt)
    heard: list[tuple[Shortage, int, int]] = []

    def again(found: Shortage, attempt: int, gpus: int) -> Plan:
        heard.append((found, attempt, gpus))
        return SAME

    _fails(monkeypatch, {8}, error=OUT_OF_MEMORY)
    out = tmp_path / "hungry"
    result = train(DDP, training.settings(out), strategies=offered(), adapt=adapt, relieve=again)
    assert result["exit_code"] == 0
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    ((found, attempt, gpus),) = heard
    assert (found.rank, found.step, found.cause, found.asked_bytes) == (1, 8, "exhausted", 2 << 30)
    assert (found.plan, attempt, gpus) == (DDP, 1, 2)
    (said,) = result["shortages"]
    assert said["why"].startswith("rank 1 ran out of memory in step 8: 1024 GiB were promised")
    assert (said["old"], said["new"]) == (fingerprint(DDP), fingerprint(SAME))
    assert result == json.loads((out / "result.json").read_text())
    assert result["plan_fingerprint"] == fingerprint(SAME) == fingerprint(codec.load(Plan, out / "plan.json"))
    assert "continuing after step 6" in (out / "log.jsonl").read_text()
    assert not (out / exhausted.NOTE).exists()
    # The same conduct, stopped in the middle of the second epoch: bit for bit what it would have been. A run that has
    # lacked memory saves more often, and each time averages the running statistics.
    calm, hungry = _weights(tmp_path / "calm"), _weights(out)
    assert all("running_" in n for n in calm if not torch.equal(calm[n], hungry[n]))
    torch.testing.assert_close(hungry, calm, rtol=1e-6, atol=1e-7)


def test_before_the_first_checkpoint_it_starts_again_and_three_attempts_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(monkeypatch, {2}, error=MemoryError())
    settings = training.settings(tmp_path, epochs=1)
    attempts: list[int] = []

    def stubborn(found: Shortage, attempt: int, gpus: int) -> Plan:
        attempts.append(attempt)
        return DDP

    with pytest.raises(ExhaustedError, match="rank 1 ran out of memory in step 2"):
        train(DDP, settings, strategies=offered(), adapt=adapt, relieve=stubborn)
    assert attempts == [1, 2, 3]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["exit_code"], result["rank"], len(result["shortages"])) == (6, 1, 3)
    settings = training.settings(tmp_path / "other", epochs=1)
    result = train(DDP, settings, strategies=offered(), adapt=adapt, relieve=lambda *_: TENSOR)
    assert (result["exit_code"], result["epochs"][0]["measurements"]["strategy"]) == (0, "asa")


def test_an_epoch_that_cannot_be_saved_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, attempts = Checkpointer.save, []

    def hungry(self: Checkpointer, *args: Any, **kwargs: Any) -> Path:
        if self.votes.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, *args, **kwargs)

    def stubborn(found: Shortage, attempt: int, gpus: int) -> Plan:
        attempts.append(attempt)
        assert len(attempts) < 5, "the same epoch is trained for ever"
        return DDP

    kills = iter(range(100))
    monkeypatch.setattr(recovery, "kernel_kills", lambda: next(kills))
    monkeypatch.setattr(Checkpointer, "save", hungry)
    with pytest.raises(WorkersFailedError, match="SIGKILL"):
        train(DDP, training.settings(tmp_path), strategies=offered(), adapt=adapt, relieve=stubborn)
    assert attempts == [1, 2, 3]


def test_after_a_shortage_a_run_saves_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as shortages come, however long ranks take to start."""
    usual = RankLosses.lost
    monkeypatch.setattr(RankLosses, "lost", lambda of, job: dataclasses.replace(usual(of, job), between_losses_s=0.01))
    _fails(monkeypatch, {4}, error=MemoryError())
    train(DDP, training.settings(tmp_path), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)
    events = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
    saved = [e["step"] for e in events if e["event"] == "checkpoint"]
    assert saved[0] < 6, "an epoch has 6 steps"


def test_it_returns_to_its_plan_when_memory_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(DDP, training.settings(tmp_path / "calm"), strategies=offered(), adapt=adapt)
    usual, first, back = worker.played, tmp_path / "short", tmp_path / "back"

    def hungry(model: Any, samples: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 3 and model.rank == 1 and not first.exists():
            first.touch()
            raise MemoryError
        if step == 8 and model.plan == SAME:
            back.touch()
        return usual(model, samples, step, *args, **kwargs)

    monkeypatch.setattr(worker, "played", hungry)
    monkeypatch.setattr(recovery, "free_on_host", lambda: 1 << 30)
    monkeypatch.setattr(exhausted, "free_on_host", lambda: (1 << 31) if back.exists() else 1 << 30)
    out = tmp_path / "hungry"
    result = train(DDP, training.settings(out), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)
    events = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    decided = [(e["kind"], e["new"]) for e in events if e["event"] == "replan"]
    assert decided == [("memory", fingerprint(SAME)), ("enough", fingerprint(DDP))]
    assert "of memory are free, 1.00 GiB when that plan ran short" in replan_line(
        next(e for e in events if e.get("kind") == "enough")
    )
    assert (result["exit_code"], result["plan_fingerprint"], len(result["shortages"])) == (0, fingerprint(DDP), 1)
    assert codec.load(Plan, out / "plan.json") == DDP
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    torch.testing.assert_close(_weights(out), _weights(tmp_path / "calm"), rtol=1e-6, atol=1e-7)


def test_a_run_does_not_return_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that only seems to be there: the plan fails again each time."""
    _fails(monkeypatch, set(range(1, 100)), error=MemoryError())
    monkeypatch.setattr(recovery, "free_on_host", lambda: 1 << 30)
    monkeypatch.setattr(exhausted, "free_on_host", lambda: 1 << 31)
    settings = training.settings(tmp_path, epochs=12)
    result = train(DDP, settings, strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)
    events = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert result["exit_code"] == 0
    assert [e["kind"] for e in events if e["event"] == "replan"] == ["memory", "enough"] * 3 + ["memory"]


def test_where_nothing_fits_the_run_ends_with_the_number_that_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(found: Shortage, attempt: int, gpus: int) -> Plan:
        raise InfeasibleError("classifier needs 9 GiB")

    _fails(monkeypatch, {1}, error=OUT_OF_MEMORY)
    with pytest.raises(InfeasibleError, match=r"rank 1 ran out of memory .* no other plan fits: classifier needs 9"):
        train(DDP, training.settings(tmp_path), strategies=offered(), adapt=adapt, relieve=none)
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 4


def test_a_process_the_kernel_killed_ran_out_of_memory_another_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(monkeypatch, {7})
    settings = training.settings(tmp_path / "shot")
    with pytest.raises(WorkersFailedError, match="SIGKILL"):
        train(DDP, settings, strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)
    kills = iter(range(100))
    monkeypatch.setattr(recovery, "kernel_kills", lambda: next(kills))
    result = train(
        DDP, training.settings(tmp_path / "out of memory"), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME
    )
    assert result["exit_code"] == 0
    assert result["shortages"][0]["why"].startswith("rank 1 was killed by the kernel for its memory")


def test_ranks_agree_between_steps_that_one_is_about_to_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tight(device: torch.device) -> list[memory_limits.MemoryLimit]:
        full = 0.99 if os.environ.get("RANK") == "1" else 0.5
        return [memory_limits.MemoryLimit(kind="device", used=int(full * 1000), limit=1000, full=full)]

    monkeypatch.setattr(memory_limits, "limits_of", tight)
    train(DDP, training.settings(tmp_path / "calm"), strategies=offered(), adapt=adapt)
    heard: list[Shortage] = []

    def again(found: Shortage, attempt: int, gpus: int) -> Plan:
        heard.append(found)
        if len(heard) == 2:
            raise InfeasibleError("nothing needs less")
        return SAME

    result = train(DDP, training.settings(tmp_path / "new"), strategies=offered(), adapt=adapt, relieve=again)
    assert [(s.rank, s.cause, s.used_bytes) for s in heard] == [(1, "tight", 990)] * 2
    assert heard[0].step < heard[1].step, "what was done is kept"
    assert (result["exit_code"], len(result["shortages"])) == (0, 1)
    log = (tmp_path / "new" / "log.jsonl").read_text()
    assert "the plan stays: nothing needs less" in log
    calm, new = _weights(tmp_path / "calm"), _weights(tmp_path / "new")
    # Saving in the middle of an epoch averages running statistics there, too: the same but for rounding.
    assert all(torch.equal(calm[n], new[n]) for n in calm if "running" not in n)
    assert all(torch.allclose(calm[n].float(), new[n].float()) for n in calm)


def _torchrun(_rank: int, out: Path, count: str) -> str:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = count
    try:
        found = train(
            DDP, training.settings(out), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME
        )  # fmt: skip
        return str(found["exit_code"])
    except WorkersFailedError as error:
        return str(error)


def test_what_torchrun_starts_again_goes_on_under_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, {8}, error=OUT_OF_MEMORY)
    with pytest.raises(WorkersFailedError, match="rank 1 ran out of memory in step 8"):
        run_ranks(2, _raising, tmp_path, threads=1, timeout_s=120)
    assert codec.load(Shortage, tmp_path / exhausted.NOTE).step == 8
    assert run_ranks(2, _torchrun, tmp_path, "1", threads=1, timeout_s=120) == ["0", "0"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert [s["new"] for s in result["shortages"]] == [result["plan_fingerprint"]] == [fingerprint(SAME)]
    assert not (tmp_path / exhausted.NOTE).exists()


def _raising(_rank: int, out: Path) -> None:
    train(DDP, training.settings(out), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)


def _wide(scale: float) -> tuple[Any, Any]:
    """Profile and cluster of the wide model, its activations promised at ``scale`` of what they are."""
    cluster = nouns.cluster()
    device = dataclasses.replace(cluster.device, memory_bytes=8 << 30, peak_fp32_flops=1e11, memory_bandwidth=1e10)
    cluster = dataclasses.replace(cluster, device=device)
    traced = trace(wide_model.wide(), torch.zeros(2, *wide_model.INPUT), name="wide_model:wide")
    graph = layer_graph(traced, model="wide_model:wide", input_shape=wide_model.INPUT, num_classes=10)
    profile = estimate(
        graph, cluster.device, model_spec="wide_model:wide", model_fingerprint=traced.model_fingerprint,
        global_batch=256, max_degree=2,
    )  # fmt: skip
    return heavier_profile(profile, scale), cluster


def test_the_model_is_corrected_to_what_was_needed_and_the_next_plan_to_less() -> None:
    profile, cluster = _wide(0.5)
    plan = solve(profile, cluster, offered(), Request(gpus=2, global_batch=256, strategies=("ddp",)))[0]
    promised = plan.prediction.memory_bytes_per_rank[1]
    found = Shortage(
        plan=plan, rank=1, step=3, cause="exhausted", asked_bytes=promised // 4, room_bytes=None,
        used_bytes=reserved(cluster.device, 1.5 * promised),
    )  # fmt: skip
    assert "512 KiB asked for" in shortage_line(dataclasses.replace(found, asked_bytes=2**19)), "not 0.00 GiB"
    first = corrected(found, 1, profile, cluster, offered())
    assert first.scale == pytest.approx(1.75, rel=0.1), "nearly all of it is activations"
    assert first.memory_bytes is not None
    assert first.memory_bytes <= 0.95 * 1.75 * promised * 1.01
    new = relieve(profile, cluster, found, 1, 2)
    assert (new.memory_scale, new.memory_bytes) == (first.scale, first.memory_bytes)
    assert max(new.prediction.memory_bytes_per_rank) <= first.memory_bytes
    assert new.profile_fingerprint == plan.profile_fingerprint, "from where it can be planned again"
    # Less than was promised, where there was not even that.
    half = dataclasses.replace(found, used_bytes=reserved(cluster.device, promised / 2))
    less = corrected(half, 1, profile, cluster, offered())
    assert less.scale == 1.0
    assert less.memory_bytes == pytest.approx(0.75 * promised, abs=2)
    with pytest.raises(InfeasibleError, match="GiB"):
        relieve(profile, cluster, dataclasses.replace(found, room_bytes=1 << 10), 1, 2)


def test_fewer_ranks_have_more_of_the_memory_that_a_host_has_for_all() -> None:
    profile, cluster = _wide(1.0)
    plan = solve(profile, cluster, offered(), Request(gpus=2, global_batch=256, strategies=("ddp",)))[0]
    alone = solve(profile, cluster, offered(), Request(gpus=1, global_batch=256))[0]
    promised = max(plan.prediction.memory_bytes_per_rank)
    base = 2 * max(alone.prediction.memory_bytes_per_rank)
    killed = Shortage(
        plan=dataclasses.replace(plan, memory_bytes=1 << 12), rank=1, step=3, cause="killed", used_bytes=None,
        asked_bytes=0, room_bytes=None, free_bytes=2 * (promised + base),
    )  # fmt: skip
    new = relieve(profile, cluster, killed, 1, 2)
    assert new.num_ranks == 1, "nothing fits on two"
    assert new.memory_bytes == pytest.approx(0.95 * (promised + promised + base), rel=1e-6)
    # Each process has as much as all of them had, less what one has without a model.
    second = relieve(profile, cluster, killed, 2, 2)
    assert second.memory_bytes == pytest.approx(0.85 * (promised + promised + base), rel=1e-6)
    for other in (dataclasses.replace(killed, free_bytes=None), dataclasses.replace(killed, cause="tight")):
        with pytest.raises(InfeasibleError, match="GiB"):
            relieve(profile, cluster, other, 1, 2)


def test_a_shortage_is_corrected_for_the_rank_that_a_process_ran() -> None:
    """After a change of plan process 1 alone trains, or processes 1 and 0 are ranks 0 and 1."""
    profile, cluster = _wide(0.5)
    two, alone = (
        solve(profile, cluster, offered(), Request(gpus=n, global_batch=256, strategies=("ddp",) * (n > 1) or None))[0]
        for n in (2, 1)
    )
    promised = alone.prediction.memory_bytes_per_rank[0]
    used = reserved(cluster.device, 1.5 * promised)
    known = {"step": 3, "cause": "exhausted", "asked_bytes": 0, "room_bytes": None, "used_bytes": used}
    of_process_0 = Shortage(plan=alone, rank=0, **known)
    wanted = corrected(of_process_0, 1, profile, cluster, offered())
    of_process_1 = dataclasses.replace(of_process_0, rank=1)
    for found in (of_process_1, dataclasses.replace(of_process_1, processes=(1,))):
        assert found.promised_bytes == promised
        assert corrected(found, 1, profile, cluster, offered()) == wanted
        assert relieve(profile, cluster, found, 1, 2).memory_scale > 1
    per_rank = dataclasses.replace(two.prediction, memory_bytes_per_rank=(promised, 3 * promised))
    turned = Shortage(plan=dataclasses.replace(two, prediction=per_rank), rank=0, processes=(1, 0), **known)
    assert (turned.plan_rank, turned.promised_bytes) == (1, 3 * promised)


def test_the_log_tells_under_which_plan_all_ranks_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(monkeypatch, {8}, error=OUT_OF_MEMORY)
    train(DDP, training.settings(tmp_path), strategies=offered(), adapt=adapt, relieve=lambda *_: SAME)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    (note,) = (e for e in events if e["event"] == "note" and "resumed_step" in e)
    assert (note["resumed_step"], note["plan_fingerprint"], note["ranks"]) == (6, fingerprint(SAME), 2)


def test_a_rank_without_memory_for_a_thread_saves_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asa.executor.training.checkpointer.threading", SimpleNamespace(Thread=NoThread))
    train(DDP, training.settings(tmp_path, epochs=1), strategies=offered(), adapt=adapt)
    assert checkpoint.find(tmp_path / "checkpoints").manifest.step > 0


def _scarce() -> tuple[Profile, Cluster, Plan]:
    """A profile that promises half of what a step takes, its cluster, and the plan they lead to."""
    profile, cluster = _wide(0.5)
    request = Request(gpus=2, global_batch=256, strategies=("ddp",))
    return profile, cluster, solve(profile, cluster, offered(), request)[0]


def run_scarcely(out: Path) -> None:
    """Train by that plan. In a fresh process: what tests before have freed is no shortage."""
    profile, cluster, plan = _scarce()
    codec.save(plan, out / "first.json")
    settings = training.settings(out, epochs=1, steps_per_epoch=3)
    train(plan, settings, strategies=offered(), adapt=adapt, relieve=partial(relieve, profile, cluster))


def test_a_rank_with_little_memory_really_runs_out_and_the_run_ends_well(tmp_path: Path) -> None:
    """A limit of the operating system on one rank, a profile that promises half of what a step takes, and the real
    planner: nothing here is pretended."""
    here, program = Path(__file__).parent, tmp_path / "program.py"
    lines = (f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]", "import pathlib, test_recovery",
             f"test_recovery.run_scarcely(pathlib.Path({str(tmp_path)!r}))")  # fmt: skip
    program.write_text("\n".join(lines))
    env = os.environ | {wide_model.LIMIT: str(100 << 20)}
    run = started(program, out=tmp_path / "said", err=tmp_path / "said.errors", env=env, cwd=here)
    assert run.wait() == 0, run.err.read_text()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["exit_code"] == 0
    assert result["shortages"]
    shortage = result["shortages"][0]["shortage"]
    assert shortage["rank"] == 1
    assert shortage["cause"] in ("exhausted", "tight"), "it fails, or is nearly there after a step"
    assert shortage["used_bytes"] <= shortage["room_bytes"]
    (epoch,) = result["epochs"]
    assert epoch["step"] == 3
    made = codec.load(Plan, tmp_path / "plan.json")
    assert made.conduct != codec.load(Plan, tmp_path / "first.json").conduct
    assert max(made.prediction.memory_bytes_per_rank) <= shortage["room_bytes"]
    manifest = checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest
    assert (manifest.plan, manifest.step) == (made, 3)
