"""Trackers that receive the curves of a run in addition to its log: TensorBoard, Weights & Biases, MLflow. All store
them locally.

A tracker gets figures at a step. It is closed once, and told whether the run succeeded. None of them sends anything
anywhere unless its own settings in the environment say so (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from asa.errors import AsaError, UnavailableError

CURVES: dict[str, dict[str, str]] = {
    "steps": {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "learning_rate": "train/learning_rate",
        "step_time_s": "time/step_s",
        "samples_per_s": "time/samples_per_s",
        "data_wait_share": "time/data_wait_share",
        "slowest_rank": "time/slowest_rank",
        "waiting_share": "time/waiting_share",
        "tflops_per_s": "compute/tflops_per_s",
        "mfu": "compute/mfu",
        "active_memory_bytes": "memory/active_bytes",
        "reserved_memory_bytes": "memory/reserved_bytes",
    },
    "epoch": {
        "train_loss": "epoch/train_loss",
        "validation_loss": "validation/loss",
        "validation_accuracy": "validation/accuracy",
        "seconds": "epoch/seconds",
    },
}
"""Names of curves by kind of event and key."""
_GPU = ("utilisation", "clock_mhz", "watts")
"""Figures of the GPU of the rank that reports, in ``gpu`` of a ``steps`` event."""


class Tracker(Protocol):
    """Receives the curves of one run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record figures, by the name of their curve, after ``step`` optimizer steps."""

    def close(self, *, succeeded: bool) -> None:
        """End the run. ``succeeded`` says whether it succeeded."""


def figures(event: Mapping[str, Any]) -> dict[str, float]:
    """Numbers in an event, by the name of their curve; unknown values are left out."""
    named = CURVES.get(event["event"], {})
    gpu = event.get("gpu") or {}
    return {tag: float(event[key]) for key, tag in named.items() if event.get(key) is not None} | {
        f"gpu/{key}": float(gpu[key]) for key in _GPU if key in gpu
    }


class TensorBoard:
    """Writes event files under ``FOLDER/tensorboard``."""

    def __init__(self, folder: Path, _name: str, _facts: Mapping[str, Any]) -> None:
        self._writer = _module("tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, *, succeeded: bool) -> None:
        self._writer.close()


_LONGEST = 200
"""Characters of a package's own message that are shown."""


class WeightsAndBiases:
    """Writes a run under ``FOLDER/wandb``. It is offline (``wandb sync`` sends it), unless ``WANDB_MODE`` says
    otherwise."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
        wandb = _module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        project = os.environ.get("WANDB_PROJECT", "asa")
        quiet = {} if "WANDB_SILENT" in os.environ else {"silent": True}  # it repeats every curve on the screen
        self._run = wandb.init(
            project=project, name=name, dir=str(folder), mode=mode, config=dict(facts), settings=quiet
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MLflow:
    """Writes a run in the experiment ``asa`` of the database ``FOLDER/mlflow.db``, or where ``MLFLOW_TRACKING_URI``
    says."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = _module("mlflow").MlflowClient(tracking_uri=uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "asa")
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        self._run = self._client.create_run(experiment_id, run_name=name).info.run_id
        for key, value in facts.items():
            self._client.log_param(self._run, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._client.log_metric(self._run, tag, value, step=step)

    def close(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")


def check(names: tuple[str, ...]) -> None:
    """Check that the trackers ``names`` are installed, by importing what they need.

    Raises:
        UnavailableError: one is not installed.
    """
    for name in names:
        _module(name)


def opened(name: str, folder: Path, run: str, facts: Mapping[str, Any]) -> Tracker:
    """Open the tracker ``name`` for ``run``, whose folder is ``folder``. ``facts`` are stored with its curves.

    Raises:
        UnavailableError: it cannot be opened: a package that it needs is missing, or its place cannot be written.
    """
    try:
        return _KINDS[name](folder, run, facts)
    except AsaError:
        raise
    except Exception as error:
        raise UnavailableError(f"curves for {name} cannot be written: {reason(error)}; do without {name}") from error


def reason(error: Exception) -> str:
    """The message of an error of a tracker's package, as the beginning of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _module(name: str) -> Any:
    """The module that the tracker ``name`` needs.

    Raises:
        UnavailableError: it is not installed.
    """
    what, module, *of_database = _NEEDED[name]
    try:
        for package in () if os.environ.get("MLFLOW_TRACKING_URI") else of_database:
            import_module(package)
        return import_module(module)
    except ImportError:
        raise UnavailableError(
            f"curves for {what} need a package: pip install 'asa-parallel[{name}]', or do without"
        ) from None


_KINDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
_NEEDED: dict[str, tuple[str, ...]] = {
    "tensorboard": ("TensorBoard", "torch.utils.tensorboard"),
    "wandb": ("Weights & Biases", "wandb"),
    "mlflow": ("MLflow", "mlflow.tracking", "sqlalchemy", "alembic"),
}
"""Title of each tracker, the module that it needs, and those of a database in the run's folder."""
NAMES = tuple(_KINDS)
"""Names of all trackers."""
