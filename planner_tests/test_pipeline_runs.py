"""Runs in stages: what they learn, and how they stop, move to other cuts and go on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from asa.errors import PreemptedError, WorkersFailedError
from asa.executor.measuring.benchmark import BenchOptions, measure
from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_optimizer_state, full_state
from asa.executor.model.step import played
from asa.executor.model.votes import Votes
from asa.executor.running import outdir
from asa.executor.running.loop import TrainingExecutor
from asa.executor.running.prepare import open_images
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.stopping import StopRequest
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.sharding.collectives import direct
from asa.strategies import offered
from asa.zoo.models import build as build_zoo
from planner_tests.small_models import INPUT, build
from planner_tests.stage_plans import staged
from planner_tests.test_pipeline import plan_of


def _trained(plan: Plan, out: Path, **changes: Any) -> dict[str, Any]:
    on_event = changes.pop("on_event", None)
    return train(plan, training.settings(out, **changes), strategies=offered(), adapt=adapt, on_event=on_event)


def _state(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.find(out / outdir.CHECKPOINTS)
    return checkpoint.read(found.path, checkpoint.MODEL) | checkpoint.read(found.path, checkpoint.OPTIMIZER)


def pipeline(widths: list[int], **options: Any) -> Plan:
    return staged(training.plan(ranks=2), widths, microbatches=2, **options)


def test_a_run_in_stages_learns_what_one_device_learns(tmp_path: Path) -> None:
    """Loss and accuracy are seen by one stage, weights by another; all are in the result and in the checkpoint."""
    one = _trained(dataclasses.replace(training.plan(), num_microbatches=2), tmp_path / "one")
    two = _trained(pipeline([1, 1]), tmp_path / "two")
    for key in ("train_loss", "validation_loss", "validation_accuracy"):
        assert [e[key] for e in two["epochs"]] == pytest.approx([e[key] for e in one["epochs"]], rel=1e-6)
    alone, apart = _state(tmp_path / "one"), _state(tmp_path / "two")
    assert alone.keys() == apart.keys()
    for name, value in alone.items():
        assert torch.equal(value, apart[name]), name


def test_activations_cross_in_the_type_they_are_computed_in(tmp_path: Path) -> None:
    """bf16 changes types layer by layer; what arrives is what one device would have handed on."""
    plans = [dataclasses.replace(p, precision="bf16") for p in (training.plan(microbatches=2), pipeline([1, 1]))]
    states = []
    for i, plan in enumerate(plans):
        _trained(plan, tmp_path / str(i), epochs=1)
        states.append(_state(tmp_path / str(i)))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_rank_that_dies_between_stages_is_named(tmp_path: Path) -> None:
    def die(rank: int, plan: Plan) -> None:
        model = materialize(
            plan, build("plain"), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(),
            device=torch.device("cpu"),
        )  # fmt: skip
        model.train()

        def labels(rows: slice) -> torch.Tensor:
            os._exit(3)

        x = torch.randn(24, *INPUT)
        played(model, torch.arange(24), 0, lambda rows: x[rows], labels)

    with pytest.raises(WorkersFailedError, match="rank 2 of 3"):
        run_ranks(3, die, plan_of("plain", [2, 1]), threads=1, timeout_s=120)


def _gathers(rank: int, plan: Plan) -> list[list[str]]:
    """Of every step: what rank ``rank`` gathers, and when it computes."""
    model = materialize(
        plan, build("plain"), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(), device=torch.device("cpu")
    )
    model.train()
    log: list[str] = []
    gather, compute = direct.all_gather_into_tensor, model.compute

    def gathered(*args: Any, **options: Any) -> Any:
        log.append("gather")
        return gather(*args, **options)

    def computed(*args: Any, **options: Any) -> Any:
        log.append("compute")
        return compute(*args, **options)

    direct.all_gather_into_tensor = gathered
    model.compute = computed  # type: ignore[method-assign]
    x, y, found = torch.randn(24, *INPUT), torch.zeros(24, dtype=torch.long), []
    for step in range(3):
        played(model, torch.arange(24), step, lambda rows: x[rows], lambda rows: y[rows])
        found.append([*log])
        log.clear()
    model.close()
    return found


def test_a_stage_that_waits_for_others_gathers_its_weights_meanwhile() -> None:
    """Once a step, and from the second on before there is anything to compute; the first stage as it goes."""
    plan = plan_of("plain", [1, 2], cuts=[1], microbatches=2, strategy=lambda i: "zero2" if i else "replicate")
    ranks = run_ranks(3, _gathers, plan, threads=1, timeout_s=120)
    assert ranks[0] == [["compute", "compute"]] * 3
    for first, *later in ranks[1:]:
        units = first.count("gather")
        assert units > 1
        assert first[0] == "compute"
        assert later == [["gather"] * units + ["compute", "compute"]] * 2


def test_a_run_in_stages_is_continued_by_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped under one cut, resumed under another, and again on one device: to the bit as if never interrupted."""
    _trained(pipeline([1, 1]), tmp_path / "whole", log_every=1)
    parts = tmp_path / "parts"
    for stop, plan in ((3, pipeline([1, 1])), (8, pipeline([1, 1], cuts=[1], schedule="gpipe"))):
        training.stopping(monkeypatch, stop)
        with pytest.raises(PreemptedError):
            _trained(plan, parts, resume=stop == 8, log_every=1)
    monkeypatch.undo()
    _trained(training.plan(microbatches=2), parts, resume=True, log_every=1)
    first, second = _state(tmp_path / "whole"), _state(parts)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_run_moves_between_cuts(tmp_path: Path) -> None:
    plans = [pipeline([1, 1]), pipeline([1, 1], cuts=[1]), training.plan(ranks=2), pipeline([1, 1], schedule="gpipe")]
    images = open_images(plans[0], training.settings(tmp_path))

    def body(rank: int) -> list[bool]:
        def parallel(plan: Plan, _processes: tuple[int, ...]) -> Any:
            model = build_zoo("cnn", num_classes=10, input_shape=(1, 8, 8), seed=0)
            return materialize(
                plan, model, torch.zeros(2, 1, 8, 8), rank=rank, strategies=offered(), device=torch.device("cpu")
            )

        executor = TrainingExecutor(
            plans[0], parallel, training.settings(tmp_path, lr=0.01, epochs=4), train=images[0], test=images[1],
            votes=Votes(120), stop=StopRequest(), announce=lambda _: None, folder=tmp_path / outdir.CHECKPOINTS,
            run="test",
        )  # fmt: skip

        def state() -> dict[str, torch.Tensor]:
            return full_state(executor.model) | full_optimizer_state(executor.model, executor._worker.optimizer)

        same = []
        for epoch, plan in enumerate(plans[1:]):
            executor.run_epoch(epoch)
            before = state()
            executor.migrate(plan)
            after = state()
            same.append(before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before))
        executor.run_epoch(3)
        executor.save(3)
        return same

    assert run_ranks(2, body, threads=1, timeout_s=120) == [[True] * 3] * 2
    assert checkpoint.find(tmp_path / outdir.CHECKPOINTS).manifest.plan == plans[-1]


def test_stages_and_data_parallelism_side_by_side(tmp_path: Path) -> None:
    plans = [training.plan(ranks=3, microbatches=2), pipeline([2, 1]), pipeline([1, 1], schedule="gpipe")]
    images = open_images(plans[0], training.settings(tmp_path))
    cells = measure(
        [dataclasses.replace(p, strategy=f"p{i}") for i, p in enumerate(plans)],
        lambda: build_zoo("cnn", num_classes=10, input_shape=(1, 8, 8), seed=0),
        offered(),
        lambda: images,
        BenchOptions(budget_s=1, lr=0.01, evaluation_samples=64, timeout_s=120),
    )
    for plan, cell in zip(plans, cells, strict=True):
        assert cell.communication_s is not None
        assert cell.peak_memory_bytes is not None
        assert len(cell.peak_memory_bytes) == plan.num_ranks
        assert min(cell.peak_memory_bytes) > 0
        assert len(cell.accuracy) == 2
        assert 0 < cell.accuracy[-1].train_loss < 5


def test_evaluation_passes_through_the_stages() -> None:
    def body(rank: int, plan: Plan) -> torch.Tensor | None:
        model = materialize(
            plan, build("plain"), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(),
            device=torch.device("cpu"),
        )  # fmt: skip
        model.eval()
        x = torch.linspace(-1, 1, 8 * 768).view(8, *INPUT)
        with torch.no_grad():
            found = [model(x[slice(*model.input_rows(8))], torch.arange(8), 0) for _ in range(5)][-1]
        model.close()
        return found

    plan = plan_of("plain", [2, 1])
    first, second, third = run_ranks(3, body, plan, threads=1, timeout_s=120)
    assert first is second is None
    model = build("plain").eval()
    with torch.no_grad():
        expected = model(torch.linspace(-1, 1, 8 * 768).view(8, *INPUT))
    torch.testing.assert_close(third, expected)
