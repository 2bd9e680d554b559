"""Curves of a run in trackers: every figure under its name and step, by stand-ins and by the real packages."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import nouns
import pytest

from asa.errors import UnavailableError
from asa.executor.training import trackers
from asa.executor.training.logs import RunLog, Work
from asa.ir import codec

START = {"event": "start", "plan_fingerprint": "f00d", "model": "cnn", "ranks": 2, "device": "cpu", "global_batch": 8}
STEPS = {
    "event": "steps", "epoch": 0, "step": 5, "loss": 2.5, "accuracy": None, "learning_rate": 0.1, "step_time_s": 0.5,
    "samples_per_s": 16.0, "data_wait_share": 0.25, "slowest_rank": 1, "waiting_share": 0.125,
    "active_memory_bytes": 1000, "reserved_memory_bytes": None, "fraction": 0.5, "eta_s": 1.0,
}  # fmt: skip
CURVES = {
    "train/loss": 2.5, "train/learning_rate": 0.1, "time/step_s": 0.5, "time/samples_per_s": 16.0,
    "time/data_wait_share": 0.25, "time/slowest_rank": 1.0, "time/waiting_share": 0.125, "memory/active_bytes": 1000.0,
    "compute/tflops_per_s": 16e-3, "compute/mfu": 0.2,
}  # fmt: skip
WORK = Work(flops_per_sample=1e9, peak_flops_per_s=4e10)


def run(folder: Path, *track: str) -> list[dict[str, Any]]:
    """A run of one line of the log and one epoch, that ends well; what its listener heard."""
    heard: list[dict[str, Any]] = []
    log = RunLog(folder, track=track, work=WORK, listener=heard.append)
    log(START)
    log(STEPS)
    log({"event": "epoch", "line": "", **codec.to_data(nouns.epoch())})
    log.finish(exit_code=0)
    return heard


def test_the_log_tells_flops_and_their_share_of_the_peak_of_the_ranks_in_force(tmp_path: Path) -> None:
    steps = run(tmp_path)[1]
    assert (steps["tflops_per_s"], steps["mfu"]) == (16e-3, 0.2), "16 samples of 1 GFLOP on 2 ranks of 40 GFLOP/s"
    heard: list[dict[str, Any]] = []
    log = RunLog(tmp_path, work=Work(flops_per_sample=1e9, peak_flops_per_s=0.0), listener=heard.append)
    log(START)
    log(STEPS)
    assert "mfu" not in heard[1], "nobody knows the peak"
    log = RunLog(tmp_path, work=WORK, listener=heard.append)
    log(START)
    log({"event": "replan", "kind": "switch", "new": "beef", "processes": [1], "why": ""})
    log(STEPS)
    assert heard[-1]["mfu"] == 0.4, "one rank is left"


class _Wandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.given: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.ended: int | None = None

    def init(self, **given: Any) -> _Wandb:
        self.given = given
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


def test_weights_and_biases_gets_every_curve_and_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run(tmp_path, "wandb")
    assert (fake.given["mode"], fake.given["dir"]) == ("offline", str(tmp_path))
    assert fake.given["config"]["model"] == "cnn"
    assert fake.logged[0] == (CURVES, 5)
    assert fake.logged[1][0]["validation/loss"] == nouns.epoch().validation_loss
    assert fake.ended == 0


def test_a_run_that_failed_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = RunLog(tmp_path, track=("wandb",))
    log(START)
    log(STEPS)
    log.finish(exit_code=4)
    assert fake.ended == 1


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
def test_the_real_weights_and_biases_writes_an_offline_run_and_nothing_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    run(tmp_path, "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert capfd.readouterr() == ("", "")


def test_a_database_that_mlflow_lacks_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.ModuleType("mlflow.tracking"))
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UnavailableError, match=r"pip install 'asa-parallel\[mlflow\]'"):
        trackers.check(("mlflow",))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    trackers.check(("mlflow",))


@pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="MLflow is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, under SQLAlchemy 2.1
def test_the_real_mlflow_keeps_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (kept,) = client.search_runs([client.get_experiment_by_name("asa").experiment_id])
    assert {name: kept.data.metrics[name] for name in CURVES} == CURVES
    assert kept.data.params["plan_fingerprint"] == "f00d"
    assert kept.info.status == "FINISHED"


@pytest.mark.parametrize("name", trackers.NAMES)
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnavailableError, match=rf"pip install 'asa-parallel\[{name}\]'"):
        RunLog(tmp_path, track=(name,))


class Failing:
    """A tracker whose methods fail from a time on."""

    def __init__(self, at: str) -> None:
        self.at, self.heard = at, list[str]()

    def open(self, *_: Any) -> Failing:
        if self.at == "open":
            raise RuntimeError("no such\ndatabase " + "x" * 500)
        return self

    def log(self, *_: Any) -> None:
        self.heard.append("log")
        if self.at == "log":
            raise OSError(28, "No space left on device")

    def close(self, **_: Any) -> None:
        self.heard.append("close")
        if self.at == "close":
            raise TimeoutError


@pytest.mark.parametrize("at", ["log", "close"])
def test_a_tracker_that_fails_ends_and_training_goes_on(at, tmp_path, monkeypatch):
    bad, good = Failing(at), Failing("never")
    kinds = {"wandb": bad.open, "mlflow": good.open}
    monkeypatch.setattr(trackers, "_KINDS", kinds)
    monkeypatch.setattr(trackers, "_NEEDED", dict.fromkeys(kinds, ("", "json")))
    heard = run(tmp_path, "wandb", "mlflow")
    assert good.heard == ["log", "log", "close"]
    assert bad.heard == (["log"] if at == "log" else ["log", "log", "close"])
    (note,) = (event["message"] for event in heard if event["event"] == "note")
    reason = "[Errno 28] No space left on device" if at == "log" else "TimeoutError"
    assert note == f"curves for wandb end here, training goes on without: {reason}"
    assert '"exit_code": 0' in (tmp_path / "result.json").read_text()


def test_a_tracker_that_cannot_be_opened_is_an_error_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_KINDS", {"mlflow": Failing("open").open})
    monkeypatch.setattr(trackers, "_NEEDED", {"mlflow": ("", "json")})
    with pytest.raises(UnavailableError, match=r"curves for mlflow cannot be written: no such database x+ \.\.\.; do"):
        run(tmp_path, "mlflow")


def test_what_a_gpu_reports_is_a_curve_too() -> None:
    gpu = {"utilisation": 0.9, "clock_mhz": 1410.0, "watts": 310.0, "held_back": ["power"], "others": 1}
    assert trackers.figures({**STEPS, "gpu": gpu}) == trackers.figures(STEPS) | {
        "gpu/utilisation": 0.9, "gpu/clock_mhz": 1410.0, "gpu/watts": 310.0,
    }  # fmt: skip
