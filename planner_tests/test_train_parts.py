"""The parts of the training loop: learning rate, optimizer, loss scale, votes, settings; and moving between plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nouns
import pytest
import torch
import training
from hypothesis import given
from hypothesis import strategies as st
from promising import Promising
from torch import nn

from asa.errors import InvalidInputError, PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.executor.model.materialize import _check, materialize
from asa.executor.model.state import full_optimizer_state, full_state
from asa.executor.model.votes import Votes
from asa.executor.observing import observe
from asa.executor.running import outdir, prepare
from asa.executor.running import run as running
from asa.executor.running.loop import TrainingExecutor
from asa.executor.running.run import train
from asa.executor.running.stored_settings import keep, recalled
from asa.executor.training import checkpoint
from asa.executor.training.clock import StepClock
from asa.executor.training.logs import RunLog, Work
from asa.executor.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from asa.executor.training.precision import LossScale
from asa.executor.training.settings import TrainSettings
from asa.executor.training.stopping import StopRequest
from asa.interfaces.executor import Placement
from asa.ir import codec
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.report.text import training as training_report
from asa.scheduler import Policy, adapt
from asa.strategies import offered
from asa.tracing import trace
from asa.zoo.data import ImageSet
from asa.zoo.models import build


@given(peak=st.floats(1e-6, 10), warmup=st.floats(0, 0.9), steps=st.integers(1, 400))
def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing(peak: float, warmup: float, steps: int) -> None:
    rates = [learning_rate(i / steps, peak, warmup=warmup, step=1 / steps) for i in range(steps)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    highest = rates.index(max(rates))
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert learning_rate(1.0, peak, warmup=warmup, step=1 / steps) == pytest.approx(0, abs=1e-12)


def test_short_runs_warm_up_over_more_of_themselves() -> None:
    settings = training.settings(Path("x"), warmup=None)
    assert settings.warm_up(10) == 0.3
    assert settings.warm_up(1000) == pytest.approx(0.1)
    assert settings.warm_up(100_000) == 0.05
    assert training.settings(Path("x"), warmup=0.0).warm_up(10) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"lr": -1.0}, {"lr": math.nan}, {"warmup": 1.0}, {"keep": 0}, {"timeout_s": 0.0}, {"threads": 0}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TrainSettings(out="x", **wrong)


@pytest.mark.parametrize("data", ["shapes", "folder:a b", "coco:x", "arrow:t.arrow", "my.module:data", "loader"])
def test_a_run_recalls_the_data_it_was_given(data: str, tmp_path: Path) -> None:
    keep(TrainSettings(out=str(tmp_path), data=data, epochs=7), tmp_path / "settings.json")
    known, notes = recalled(tmp_path)
    assert (known["data"], known["epochs"], notes) == (data, 7, ())
    with pytest.raises(UsageError, match="no data set is called 'shape'; did you mean shapes"):
        TrainSettings(out="", data="shape")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizer_treats_shards_like_the_whole(name: Any) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(8, 6))
    shards = [nn.Parameter(part.clone()) for part in whole.detach().chunk(2)]
    optimizers = [build_optimizer(name, [whole]), *(build_optimizer(name, [s]) for s in shards)]
    for optimizer in optimizers:
        set_learning_rate(optimizer, 0.05)
    for step in range(4):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient.clone()
        for shard, part in zip(shards, gradient.chunk(2), strict=True):
            shard.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([s.detach() for s in shards]), whole.detach())
    assert len(optimizers[0].param_groups) == 1
    build_optimizer(name, []).step()


def test_a_loss_scale_skips_everywhere_when_one_rank_overflows() -> None:
    def body(rank: int) -> list[tuple[bool, float, float]]:
        scale, votes = LossScale("fp16"), Votes(120)
        parameter = nn.Parameter(torch.ones(3))
        found = []
        for step in range(2):
            overflow = step == 0 and rank == 1
            parameter.grad = torch.full((3,), math.inf if overflow else 2 * scale.value)
            updated = scale.unscale([parameter], votes)
            found.append((updated, scale.value, float(parameter.grad[0])))
        return found

    first, second = run_ranks(2, body, threads=1, timeout_s=120)
    assert [f[:2] for f in first] == [f[:2] for f in second] == [(False, 32768.0), (True, 32768.0)]
    assert first[1][2] == 2.0
    inert = LossScale("bf16")
    assert inert.scaled(torch.tensor(3.0)) == 3.0
    growing = LossScale("fp16", 2.0)
    growing.GROW_AFTER = 1  # type: ignore[misc]
    assert growing.unscale([], Votes())
    assert growing.value == 4.0


def test_votes_carry_figures_words_and_one_reason() -> None:
    def body(rank: int) -> tuple[Any, ...]:
        votes = Votes(120)
        said = votes.tell({"rank": rank, "ä": [None, 1.5]}, source=1)
        yes = votes.everyone(rank < 5), votes.everyone(rank != 1), votes.anyone(rank == 1), votes.anyone(False)
        reasons = []
        for error in (InvalidInputError("torn", where="byte 3"), KeyError("x")):
            try:
                votes.agree(error if rank == 1 else None)
            except (InvalidInputError, WorkersFailedError) as caught:
                reasons.append((type(caught).__name__, str(caught)))
        votes.agree(None)
        once = votes.once(lambda: rank + 10)
        return said, yes, reasons, once, votes.gather([float(rank), 2.0])

    one, two = run_ranks(2, body, threads=1, timeout_s=120)
    assert one[0] == two[0] == {"rank": 1, "ä": [None, 1.5]}
    assert one[1] == two[1] == (True, False, True, False)
    assert (
        one[2]
        == two[2]
        == [
            ("InvalidInputError", "torn (at byte 3)"),
            ("WorkersFailedError", "rank 1 failed with KeyError: 'x'"),
        ]
    )
    assert (one[3], two[3]) == (10, None)
    assert one[4] == two[4] == [[0.0, 2.0], [1.0, 2.0]]
    alone = Votes()
    assert alone.tell((1, 2)) == [1, 2]
    with pytest.raises(UsageError, match="no"):
        alone.once(lambda: (_ for _ in ()).throw(UsageError("no")))


def test_the_clock_tells_waiting_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps begin at 0, 10 and 20; their data comes after 1, 2 and 3 seconds, and work lasts 4."""
    now = iter([0.0, 1.0, 5.0, 10.0, 12.0, 16.0, 20.0, 23.0, 27.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    for _ in range(9):
        clock.mark()
    times = clock.collect()
    assert [(t.data, t.work, t.blocked) for t in times] == [(1.0, 4.0, 0.0), (2.0, 4.0, 0.0), (3.0, 4.0, 0.0)]
    assert clock.collect() == []


def test_a_log_that_was_torn_is_still_read(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    records = [codec.to_data(nouns.epoch(epoch)) for epoch in range(3)]
    for record in records:
        log({"event": "epoch", "line": "as foreseen", **record})
    log({"event": "epoch", "line": "of another program", "epoch": 0})
    log({"event": "epoch", "line": "by hand", **records[0], "step": "many"})
    with (tmp_path / "log.jsonl").open("a") as stream:
        stream.write('{"event": "epoch", "epo')
    again = RunLog(tmp_path)
    again.recall(2)
    assert again.epochs == records[:2]
    with pytest.raises(ValueError, match="JSON"):
        again({"event": "note", "message": math.nan})
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(UnavailableError, match="cannot write"):
        again({"event": "note", "message": "x"})


def test_a_run_adds_up_its_time_and_cost_and_finds_its_target(tmp_path: Path) -> None:
    log = RunLog(tmp_path, target=0.9, price=7.2)
    for number, accuracy in enumerate((0.5, None, 0.92, 0.91)):
        record = dataclasses.replace(nouns.epoch(number), seconds=100.0, validation_accuracy=accuracy)
        log({"event": "epoch", "line": "", **codec.to_data(record)})
    ranks = nouns.epoch(0).measurements.num_ranks
    aim = log.finish(exit_code=0)["aim"]
    assert (aim["epochs"], aim["seconds"], aim["epochs_to_target"], aim["seconds_to_target"]) == (4, 400.0, 3, 300.0)
    assert aim["cost_of_run"] == pytest.approx(0.8 * ranks), "400 s at 7.2 an hour"
    assert aim["cost_to_target"] == pytest.approx(0.6 * ranks)
    text = "\n".join(training_report.aim(aim))
    assert f"cost: {0.2 * ranks:.3g} an epoch, {0.8 * ranks:.3g} for 4 epochs" in text
    assert "target: accuracy 90.0 % after 3 epochs" in text
    missed = training_report.aim(log.finish(exit_code=0)["aim"] | {"epochs_to_target": None})
    assert "not reached in 4 epochs" in missed[-1]
    assert "aim" not in RunLog(tmp_path).finish(exit_code=0), "where nothing was asked for"


def test_ranks_that_are_started_again_all_count_for_the_use_of_devices(tmp_path: Path) -> None:
    """Also those that a change of plan had left out."""
    heard: list[dict[str, Any]] = []
    log = RunLog(tmp_path, work=Work(flops_per_sample=1e9, peak_flops_per_s=1e12), listener=heard.append)
    two = {"plan_fingerprint": "f00d", "ranks": 2}
    log({"event": "start", "model": "cnn", "device": "cpu", "global_batch": 8, **two})
    steps, switch = {"event": "steps", "samples_per_s": 100.0}, {"event": "replan", "kind": "switch", "processes": [0]}
    note = {"event": "note", "message": "continuing after step 6", "resumed_step": 6, **two}
    for event in (steps, switch, steps, note, steps):
        log(event)
    assert [e["mfu"] for e in heard if e["event"] == "steps"] == pytest.approx([0.05, 0.1, 0.05])


def test_data_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    """As those of a function that draws without a seed, in the processes of a launcher."""
    found = run_ranks(2, _materials, str(tmp_path), timeout_s=120)
    assert all("rank 1 reads other samples than rank 0 from --data digits" in text for text in found)


def _materials(rank: int, out: str) -> str:
    """What a rank says about samples whose labels are another rank's in another order."""
    plan, settings = training.plan(), training.settings(Path(out), data="digits")
    train, test = prepare.open_images(plan, settings)
    other = dataclasses.replace(train, labels=train.labels.roll(rank))
    job = SimpleNamespace(plan=plan, settings=settings)
    own = prepare.Material(train=other, test=test, run="", resume=None)
    if rank:
        running.open_images = lambda *_: (other, test)  # type: ignore[attr-defined]
    try:
        running._agree_on_material(job, Votes(120), own if rank == 0 else None)  # type: ignore[arg-type]
    except InvalidInputError as error:
        return str(error)
    return ""


@functools.cache
def _images() -> tuple[ImageSet, ImageSet]:
    """Read once, before ranks are forked."""
    return prepare.open_images(training.plan(), training.settings(Path("x")))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run's directory, with the images already in memory."""
    _images()
    return tmp_path


def _executor(rank: int, out: str, plan: Plan, stop: StopRequest | None = None) -> TrainingExecutor:
    settings = training.settings(Path(out), lr=0.01)
    images = _images()

    def parallel(plan: Plan, processes: tuple[int, ...]) -> Any:
        model = build(plan.model_spec, num_classes=10, input_shape=(1, 8, 8), seed=0)
        return materialize(
            plan, model, torch.zeros(2, 1, 8, 8), rank=rank, strategies=offered(), device=torch.device("cpu"), seed=0,
            processes=processes,
        )  # fmt: skip

    return TrainingExecutor(
        plan,
        parallel,
        settings,
        train=images[0],
        test=images[1],
        votes=Votes(120),
        stop=stop or StopRequest(),
        announce=lambda _: None,
        folder=Path(out) / outdir.CHECKPOINTS,
        run="test",
    )


DDP = training.plan(ranks=2)
MIXED = training.plan(ranks=2, split=("features.2.conv", "classifier"))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_migration_moves_every_bit_and_training_goes_on(out: Path, optimizer: Any) -> None:
    ddp, mixed = (dataclasses.replace(p, optimizer=optimizer) for p in (DDP, MIXED))

    def state(executor: TrainingExecutor) -> dict[str, torch.Tensor]:
        return full_state(executor.model) | full_optimizer_state(executor.model, executor._worker.optimizer)

    def body(rank: int) -> tuple[list[bool], list[float], list[str]]:
        executor = _executor(rank, str(out), ddp)
        same, losses, plans = [], [], []
        for epoch, plan in enumerate((mixed, ddp, None)):
            losses.append(executor.run_epoch(epoch).train_loss)
            before = state(executor)
            agreed = executor.agree(Placement(plan=plan, processes=(0, 1)) if rank == 0 and plan is not None else None)
            if agreed is not None:
                executor.migrate(agreed.plan, agreed.processes)
            after = state(executor)
            same.append(before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before))
            plans.append(fingerprint(executor.plan))
            executor.save(epoch)
        return same, losses, plans

    one, two = run_ranks(2, body, threads=1, timeout_s=120)
    assert one == two
    assert one[0] == [True] * 3
    assert one[1][2] < one[1][1] < one[1][0]
    assert one[2] == [fingerprint(p) for p in (mixed, ddp, ddp)]
    assert checkpoint.find(out / outdir.CHECKPOINTS).manifest.plan == ddp


def test_a_migration_that_one_rank_cannot_make_is_made_by_none(out: Path) -> None:
    def body(rank: int) -> tuple[str, bool, float]:
        executor = _executor(rank, str(out), DDP)
        executor.run_epoch(0)
        before = full_state(executor.model)
        real = executor._build
        executor._build = lambda *placed: _break(real(*placed)) if rank == 1 else real(*placed)
        with pytest.raises(WorkersFailedError, match="no memory left") as caught:
            executor.migrate(MIXED)
        with pytest.raises(UsageError, match="for 3 ranks: this run has 2"):
            executor.migrate(training.plan(ranks=3))
        for wrong in ((0, 2), (1, 1), (0,)):
            with pytest.raises(UsageError, match="for 2 ranks on processes"):
                executor.migrate(MIXED, wrong)
        after = full_state(executor.model)
        same = all(torch.equal(before[n], after[n]) for n in before)
        return str(caught.value), same and executor.plan == DDP, executor.run_epoch(1).train_loss

    one, two = run_ranks(2, body, threads=1, timeout_s=120)
    assert one == two == (one[0], True, one[2])
    assert one[0].startswith("rank 1 failed with MemoryError: no memory left (test_train_parts.py:")


def _break(_: object) -> Any:
    raise MemoryError("no memory left")


@pytest.mark.parametrize(("better_s", "kinds"), [(50.0, []), (200.0, ["rollback"])], ids=["faster", "slower"])
def test_a_whole_run_changes_its_plan_and_back_if_that_was_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better_s: float, kinds: list[str]
) -> None:
    """The promise is broken by design, the other plan's is one nobody could resist. Steps are so long that any change
    pays, however long it takes."""
    small = training.plan(ranks=2, step_s=1e-6)
    better = training.plan(ranks=2, split=("classifier",), step_s=1e-7)
    promised = dataclasses.replace(small.certificate, lower_bound_s=1e-8)
    small = dataclasses.replace(small, certificate=promised)
    training.clocked(monkeypatch, lambda plan: better_s if plan.strategy == better.strategy else 100.0)
    events: list[dict[str, Any]] = []
    result = train(
        small,
        training.settings(tmp_path, epochs=3, steps_per_epoch=45),
        strategies=offered(),
        adapt=functools.partial(adapt, model=Promising(better), policy=Policy(rebuild_s=0.0, patience=0.0)),
        on_event=events.append,
    )
    assert result["exit_code"] == 0
    changes = [e for e in events if e["event"] == "replan" and e["kind"] not in ("keep", "wait")]
    assert [c["kind"] for c in changes] == ["switch", "outcome", *kinds]
    assert (changes[0]["old"], changes[0]["new"]) == (fingerprint(small), fingerprint(better))
    assert changes[1]["measured_gain"] == pytest.approx(1 - better_s / 100.0)
    used = [e["measurements"]["plan_fingerprint"] for e in result["epochs"]]
    assert used[2] == fingerprint(small if kinds else better)
    # The switch is part of the checkpoint: whoever resumes sees the plan that was in force.
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.plan_fingerprint == used[2]


def test_a_batch_larger_than_the_data_or_too_small_for_the_ranks(out: Path) -> None:
    def body(rank: int) -> tuple[int, int]:
        executor = _executor(rank, str(out), training.plan(batch=1436))
        # 1437 = 1436 + 1: BatchNorm cannot train on the one that is left.
        return executor.unused_samples, executor.steps_per_epoch

    assert run_ranks(1, body, threads=1) == [(1, 1)]

    def larger(rank: int) -> int:
        executor = _executor(rank, str(out), training.plan(batch=4096))
        return executor.steps_per_epoch

    assert run_ranks(1, larger, threads=1) == [1]


def test_samples_that_another_plan_leaves_out_are_told(out: Path) -> None:
    """1437 = 7 * 205 + 2: one rank trains on the last two, each of two ranks would have one, too few for BatchNorm."""
    two, one = (training.plan(ranks=ranks, batch=205) for ranks in (2, 1))

    def body(rank: int) -> list[str]:
        executor, told = _executor(rank, str(out), two), list[str]()
        executor._announce = lambda event: told.append(event["message"])
        for plan, processes in ((one, (1,)), (one, (0,)), (two, (0, 1))):
            executor.migrate(plan, processes)
        return told

    again, left_out = "the last 2 samples of every epoch are used again", "2 samples of every epoch are left out"
    for told in run_ranks(2, body, threads=1, timeout_s=120):
        assert [line.partition(":")[0] for line in told] == [again, left_out]


def test_stopping_before_the_first_step_saves_and_says_so(out: Path) -> None:
    def body(rank: int) -> tuple[str, int]:
        stop = StopRequest()
        stop.requested = rank == 1
        executor = _executor(rank, str(out), DDP, stop)
        with pytest.raises(PreemptedError) as caught:
            executor.run_epoch(0)
        return str(caught.value).split(",")[0], executor.step

    assert run_ranks(2, body, threads=1, timeout_s=120) == [("stopped on request after step 0", 0)] * 2
    assert checkpoint.find(out / outdir.CHECKPOINTS).manifest.position == 0


def test_a_plan_for_another_model_says_where_they_part() -> None:
    model = build("cnn", num_classes=10, input_shape=(1, 8, 8))
    found = trace(model, torch.zeros(2, 1, 8, 8), name="cnn")
    made = training.plan()
    shorter = dataclasses.replace(made, components=made.components[:-1])
    with pytest.raises(InvalidInputError, match="it has 3 components, the model has 4; profile and plan it again"):
        _check(shorter, found, offered())
    renamed = dataclasses.replace(made.components[1], name="stem")
    other = dataclasses.replace(made, components=(made.components[0], renamed, *made.components[2:]))
    with pytest.raises(InvalidInputError, match=r"it has 'stem' where the model has 'features.1.conv'"):
        _check(other, found, offered())


@pytest.mark.parametrize("count", [1, 2])
def test_memory_is_measured_from_the_first_warm_step_on_a_whole_batch(tmp_path: Path, monkeypatch, count) -> None:
    ran: list[str] = []

    @contextlib.contextmanager
    def recorded(worker):
        ran.append("begin")
        yield lambda: 7
        ran.append("end")

    monkeypatch.setattr(observe, "peak_recorded", recorded)
    worker = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cpu")), conduct=SimpleNamespace(recorded_steps=count)
    )
    observer = observe.Observer(None, tmp_path, 0)  # type: ignore[arg-type]
    whole = (True, True, False, True, True, True)  # the third step, at which records begin, has the rest of an epoch
    disturbed = [
        observer.run(worker, number, lambda: ran.append("step"), full=full)  # type: ignore[arg-type]
        for number, full in enumerate(whole)
    ]
    assert disturbed == [*3 * [False], *count * [True], *(3 - count) * [False]]
    assert ran == [*3 * ["step"], "begin", *count * ["step"], "end", *(3 - count) * ["step"]]
    assert observer.peak_bytes == 7


def test_memory_of_several_steps_is_recorded_anew_if_an_epoch_ends_before(tmp_path: Path, monkeypatch) -> None:
    ended: list[int] = []

    @contextlib.contextmanager
    def recorded(worker):
        yield lambda: 7
        ended.append(1)

    monkeypatch.setattr(observe, "peak_recorded", recorded)
    worker = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cpu")), conduct=SimpleNamespace(recorded_steps=4)
    )
    observer = observe.Observer(None, tmp_path, 0)  # type: ignore[arg-type]
    for number in range(5):
        observer.run(worker, number, lambda: None, full=True)  # type: ignore[arg-type]
    observer.finish()
    assert (ended, observer.peak_bytes) == ([1], None)
    for number in range(5, 9):
        observer.run(worker, number, lambda: None, full=True)  # type: ignore[arg-type]
    assert (ended, observer.peak_bytes) == ([1, 1], 7)
