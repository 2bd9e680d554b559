"""Mixed precision under every strategy: forward in half, weights and optimizer in fp32, the loss of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.errors import UnavailableError, WorkersFailedError
from asa.executor.model.votes import Votes
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.precision import LossScale
from asa.ir.plan import Plan
from asa.profiler.machine import require_precision
from asa.scheduler import adapt
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from planner_tests.hand_plans import traced as traced_model
from planner_tests.small_models import INPUT, build


def under(made: Plan, names: tuple[str, ...]) -> Plan:
    return replace(
        made,
        components=tuple(
            replace(c, data=replace(c.data, strategy=names[i % len(names)] if c.data.degree > 1 else "replicate"))
            for i, c in enumerate(made.components)
        ),
    )


def trained(made: Plan, out: Path) -> tuple[float, dict[str, torch.Tensor]]:
    settings = training.settings(out, epochs=1, steps_per_epoch=3, lr=0.01, warmup=0.0, batch_norm="exact")
    result = train(made, settings, strategies=offered(), adapt=adapt)
    return result["epochs"][0]["train_loss"], checkpoint.read(
        checkpoint.find(out / outdir.CHECKPOINTS).path, checkpoint.MODEL
    )


@pytest.mark.parametrize(
    ("names", "split"),
    [(("replicate", "zero1", "zero2", "zero3"), ()), (("zero3", "zero2"), ("classifier", "features.1.conv"))],
    ids=["data", "sharded-tensor"],
)
def test_bf16_trains_as_on_one_device(names: Any, split: Any, tmp_path: Path) -> None:
    loss, alone = trained(training.plan(precision="bf16"), tmp_path / "alone")
    made = under(training.plan(ranks=2, split=split, precision="bf16"), names)
    other, weights = trained(made, tmp_path / "spread")
    assert other == pytest.approx(loss, rel=2e-2)
    assert {t.dtype for n, t in weights.items() if t.is_floating_point()} == {torch.float32}
    for name, value in alone.items():
        if value.is_floating_point():
            assert torch.linalg.vector_norm(weights[name] - value) <= 0.05 * torch.linalg.vector_norm(value) + 1e-2, (
                name
            )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_learns_under_any_layout(tmp_path: Path, precision: Any) -> None:
    settings = training.settings(tmp_path, steps_per_epoch=None, epochs=1)
    made = training.plan(ranks=2, split=("classifier",), precision=precision)
    result = train(made, settings, strategies=offered(), adapt=adapt)
    assert result["epochs"][0]["validation_accuracy"] > 0.3
    weights = checkpoint.read(checkpoint.find(tmp_path / outdir.CHECKPOINTS).path, checkpoint.MODEL)
    assert weights["classifier.weight"].dtype == torch.float32


def test_tf32_is_priced_where_a_card_has_it_and_refused_elsewhere() -> None:
    assert presets.load("a100-nvlink-8").device.peak_flops("tf32") == 156e12
    assert presets.load("v100-dgx1-8").device.peak_flops("tf32") == 0.0
    assert presets.load("t4-pcie-4").device.peak_flops("tf32") == 0.0
    with pytest.raises(UnavailableError, match="a CPU has no TF32"):
        require_precision(torch.device("cpu"), "tf32")


def test_cards_without_bf16_have_no_peak_for_it() -> None:
    """What V100 and T4 state for half precision is that of fp16: in bf16 torch computes on their fp32 cores."""
    for name in ("v100-dgx1-8", "t4-pcie-4"):
        device = presets.load(name).device
        assert device.peak_flops("bf16") == 0.0
        assert device.peak_flops("fp16") == device.peak_bf16_flops > 0
    assert presets.load("a100-nvlink-8").device.peak_flops("bf16") == 312e12


def test_tf32_is_estimated_between_fp32_and_bf16() -> None:
    device = presets.load("a100-nvlink-8").device
    model = build("plain")
    graph = layer_graph(traced_model(model, INPUT), model="plain", input_shape=INPUT, num_classes=100)

    def seconds(precision: Any) -> float:
        found = estimate(
            graph, replace(device, memory_bandwidth=1e18), model_spec="plain", model_fingerprint="0" * 16,
            precision=precision, global_batch=1 << 20,
        )  # fmt: skip
        return max(t.forward.median for t in found.timings)

    assert seconds("bf16") < seconds("tf32") < seconds("fp32")


def test_gradients_that_are_finite_at_no_scale_end_the_run() -> None:
    scale, p = LossScale("fp16", 2 * LossScale.LEAST), torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), torch.inf)
    assert not scale.unscale([p], Votes())
    with pytest.raises(WorkersFailedError, match="however small the loss is scaled; take bf16"):
        scale.unscale([p], Votes())
