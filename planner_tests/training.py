"""Small plans that train for real: the zoo's ``cnn`` (or logistic regression) on the handwritten digits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from asa.executor.training.settings import TrainSettings
from asa.ir.plan import (
    Assignment,
    Certificate,
    DataDegree,
    OptimizerName,
    Plan,
    Prediction,
    Stage,
    TensorDegree,
)
from asa.ir.profile import Precision

COMPONENTS = {
    "cnn": ("features.0.conv", "features.1.conv", "features.2.conv", "classifier"),
    "logistic": ("model",),
}


@cache
def fingerprint_of(model: str) -> str:
    """What tracing the model gives."""
    import torch

    from asa.tracing import trace
    from asa.zoo.models import build

    return trace(
        build(model, num_classes=10, input_shape=(1, 8, 8)), torch.zeros(2, 1, 8, 8), name=model
    ).model_fingerprint


def plan(
    model: str = "cnn",
    *,
    ranks: int = 1,
    split: tuple[str, ...] = (),
    batch: int = 64,
    microbatches: int = 1,
    optimizer: OptimizerName = "sgd",
    precision: Precision = "fp32",
    step_s: float = 100.0,
) -> Plan:
    """Data parallel over ``ranks``; the components in ``split`` tensor parallel instead.

    The promise of ``step_s`` is one that any machine keeps, give or take everything.
    """
    components = tuple(
        Assignment(
            name=name,
            stage=0,
            data=DataDegree(strategy="replicate", degree=1 if name in split else ranks),
            tensor=TensorDegree(strategy="tensor" if name in split else "none", degree=ranks if name in split else 1),
        )
        for name in COMPONENTS[model]
    )
    return Plan(
        model_spec=model,
        model_fingerprint=fingerprint_of(model),
        profile_fingerprint="0" * 16,
        cluster="none",
        cluster_fingerprint="0" * 16,
        input_shape=(1, 8, 8),
        num_classes=10,
        strategy="asa" if split else "ddp",
        gpus=ranks,
        global_batch=batch,
        precision=precision,
        optimizer=optimizer,
        device_type="cpu",
        components=components,
        stages=(Stage(ranks=tuple(range(ranks))),),
        schedule="none",
        num_microbatches=microbatches,
        prediction=Prediction(
            step_time_s=step_s,
            step_time_low_s=0.0,
            step_time_high_s=step_s,
            compute_s=step_s,
            exposed_communication_s=0.0,
            hidden_communication_s=0.0,
            update_s=0.0,
            bubble_s=0.0,
            memory_bytes_per_rank=(1 << 40,) * ranks,
            samples_per_s=batch / step_s,
        ),
        certificate=Certificate(
            solver="ilp", status="optimal", lower_bound_s=step_s, gap=0.0, space="a test", solve_s=0.0
        ),
        baselines=(),
        origin="measured",
    )


def settings(out: Path, **changes: Any) -> TrainSettings:
    """Two short epochs on digits, checked often."""
    usual: dict[str, Any] = {
        "data": "digits",
        "epochs": 2,
        "steps_per_epoch": 6,
        "lr": 0.05,
        "warmup": 0.5,
        "log_every": 2,
        "timeout_s": 30.0,
    }
    return TrainSettings(out=str(out), **(usual | changes))
