"""A plan with fewer ranks than there are processes: some idle, take part in every vote, and are taken back."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training

from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_state
from asa.executor.model.votes import Votes
from asa.executor.running import outdir, planned
from asa.executor.running.loop import TrainingExecutor
from asa.executor.running.prepare import open_images
from asa.executor.training import checkpoint
from asa.executor.training.settings import TrainSettings
from asa.executor.training.stopping import StopRequest
from asa.interfaces.executor import Placement, Probe
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.zoo.models import build

TWO, ONE = training.plan("logistic", ranks=2), training.plan("logistic")
"""Without BatchNorm, so that a step on one rank is a step on two, but for rounding."""
Placed = tuple[Plan, tuple[int, ...]]


def _executor(rank: int, first: Plan, settings: TrainSettings) -> TrainingExecutor:
    def parallel(plan: Plan, processes: tuple[int, ...]) -> Any:
        model = build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0)
        return materialize(
            plan, model, torch.zeros(2, 1, 8, 8), rank=rank, strategies=offered(), device=torch.device("cpu"),
            processes=processes,
        )  # fmt: skip

    train, test = open_images(first, settings)
    return TrainingExecutor(
        first, parallel, settings, train=train, test=test, votes=Votes(120), stop=StopRequest(),
        announce=lambda _: None, folder=Path(settings.out) / outdir.CHECKPOINTS, run="test",
    )  # fmt: skip


def _run(
    out: Path, epochs: list[dict[int, Placed]], ranks: int = 2, **settings: Any
) -> list[tuple[list[float], list[Measurements], dict[str, torch.Tensor], Probe]]:
    """An executor on every process, which moves as told at the first look at or behind a step of an epoch (-1: behind
    the epoch): losses, measurements, final weights, probes."""
    first = training.plan("logistic", ranks=ranks)

    def body(rank: int) -> tuple[list[float], list[Measurements], dict[str, torch.Tensor], Probe]:
        executor = _executor(rank, first, training.settings(out, steps_per_epoch=12, epochs=len(epochs), **settings))
        losses, measured = [], []
        for epoch, moves in enumerate(epochs):
            left = dict(moves)

            def look(seen: Measurements, step: int, left: dict[int, Placed] = left, epoch: int = epoch) -> None:
                due = [at for at in left if 0 <= at <= step - 12 * epoch]
                if due:
                    plan, processes = left.pop(due[0])
                    target = executor.agree(Placement(plan=plan, processes=processes) if rank == 0 else None)
                    assert target is not None
                    executor.migrate(target.plan, target.processes)

            outcome = executor.run_epoch(epoch, look)
            losses += [outcome.train_loss, outcome.validation_loss]
            measured.append(outcome.measurements)
            executor.save(epoch)
            if -1 in left:
                executor.migrate(*left.pop(-1))
            assert not left, "every move was made"
        return losses, measured, full_state(executor.model), executor.probe()

    return run_ranks(ranks, body, threads=1, timeout_s=120)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_run_leaves_a_process_out_and_takes_it_back(tmp_path: Path, alone: int) -> None:
    """In the middle of an epoch, too; it learns what two ranks learn, whichever goes on alone."""
    steady = _run(tmp_path / "steady", [{}, {}, {}])
    moved = _run(tmp_path / "moved", [{6: (ONE, (alone,))}, {}, {4: (TWO, (1, 0))}])
    for rank in range(2):
        assert moved[rank][0] == pytest.approx(steady[rank][0], rel=1e-4)
        assert moved[rank][0] == moved[0][0]
    for name, value in steady[0][2].items():
        torch.testing.assert_close(moved[0][2][name], value, rtol=1e-4, atol=1e-5)
    middle = moved[0][1][1]
    assert middle == moved[1][1][1]
    assert middle.num_ranks == 1
    assert len(middle.per_rank) == 2
    assert middle.per_rank[alone].own_s > 0
    assert middle.per_rank[1 - alone].own_s == 0
    assert middle.communication_s is None
    assert middle.peak_memory_bytes is None or len(middle.peak_memory_bytes) == 1
    probe = moved[0][3]
    assert probe == moved[1][3]
    assert len(probe.compute_s) == 2
    assert min(probe.compute_s) > 0
    (link,) = probe.links
    assert (link.op, link.level, link.group_size) == ("all_reduce", 0, 2)
    assert link.seconds > 0
    found = checkpoint.find(tmp_path / "moved" / outdir.CHECKPOINTS)
    assert found.manifest.step == 36
    saved = checkpoint.read(found.path, checkpoint.MODEL)
    assert all(torch.equal(saved[name], value) for name, value in moved[0][2].items())


def test_an_idle_process_measures_its_speed_while_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that trains, not in a window that is shorter than the measurement, and not before any change of plan."""
    now = [0.0]
    monkeypatch.setattr(planned, "measure_idle", lambda device: 123.0)
    monkeypatch.setattr(planned, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter))
    first = training.plan("logistic", ranks=2)

    def body(rank: int) -> list[bool]:
        executor = _executor(rank, first, training.settings(tmp_path))

        def after(seconds: float) -> bool:
            now[0] += seconds
            executor.agree(None)
            return 123.0 in executor.probe().compute_s

        seen = [after(0.6)]
        target = executor.agree(Placement(plan=ONE, processes=(1,)) if rank == 0 else None)
        assert target is not None
        executor.migrate(target.plan, target.processes)
        seen += [after(0.6), after(0.0)]
        now[0] += 0.6
        executor.agree(None)
        return [*seen, executor.probe().compute_s[1] == 123.0]

    assert run_ranks(2, body, threads=1, timeout_s=120) == [[False, True, False, False]] * 2


def test_the_process_that_writes_is_one_that_has_the_weights(tmp_path: Path) -> None:
    found = _run(tmp_path, [{-1: (ONE, (1,))}, {}])
    manifest = checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest
    assert manifest.step == 24
    assert manifest.plan.num_ranks == 1
    assert found[0][2] == {}, "the idle one holds nothing"
    assert found[1][2]


def test_three_two_and_three_ranks_again(tmp_path: Path) -> None:
    three = dataclasses.replace(training.plan("logistic", ranks=3))
    steady = _run(tmp_path / "steady", [{}, {}], ranks=3)
    moved = _run(tmp_path / "moved", [{4: (TWO, (2, 0))}, {4: (three, (0, 1, 2))}], ranks=3)
    assert moved[1][0] == pytest.approx(steady[1][0], rel=1e-4)
    for name, value in steady[0][2].items():
        torch.testing.assert_close(moved[0][2][name], value, rtol=1e-4, atol=1e-5)
