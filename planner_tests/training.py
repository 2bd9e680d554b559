"""Small plans that train for real: the zoo's ``cnn`` (or logistic regression) on the handwritten digits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import pytest

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
        "timeout_s": 120.0,
    }
    return TrainSettings(out=str(out), **(usual | changes))


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Plan], float]) -> None:
    """Let every step take so many seconds under its plan, on all ranks, whatever the machine does meanwhile."""
    from asa.executor.training.clock import StepTimes
    from asa.executor.training.epoch_timer import EpochTimer
    from asa.executor.training.rank_times import Stolen

    usual = EpochTimer.exchange

    def exchange(timer: EpochTimer, *args: Any, **options: Any) -> Any:
        def collect() -> list[StepTimes]:
            taken, timer.clock._steps = len(timer.clock._steps), []
            return [StepTimes(0.0, seconds(timer.plan))] * taken

        timer.clock.collect = collect  # type: ignore[method-assign]
        return usual(timer, *args, **options)

    monkeypatch.setattr(EpochTimer, "exchange", exchange)
    monkeypatch.setattr(Stolen, "share", lambda _: -1.0)  # as where the system does not tell


def stopping(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let rank 0 ask the process that started it to stop all ranks, in ``step``, and go on when it has heard so itself.
    However late a busy machine passes a request on, the run is not over by then."""
    from asa.executor.training import worker

    usual = worker.played

    def asking(model: Any, samples: Any, now: int, *args: Any, **options: Any) -> Any:
        if now == step and model.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            heard: Any = signal.getsignal(signal.SIGTERM)
            while not heard.__self__.requested:
                time.sleep(0.01)
        return usual(model, samples, now, *args, **options)

    monkeypatch.setattr(worker, "played", asking)
