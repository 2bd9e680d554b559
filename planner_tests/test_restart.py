"""torchrun starts all ranks again by the same command: they go on from what they had saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import training

from asa.errors import UsageError
from asa.executor.running.run import train
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.strategies import offered


def _again(_rank: int, out: Path, count: str, epochs: int = 2, job: str = "") -> str:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = count
    if job:
        os.environ["TORCHELASTIC_RUN_ID"] = job
    try:
        settings = training.settings(out, epochs=epochs)
        return str(train(training.plan(ranks=2), settings, strategies=offered(), adapt=adapt)["exit_code"])
    except UsageError as error:
        return str(error)


def test_a_restarted_command_resumes_and_a_first_one_never_writes_over_a_run(tmp_path: Path) -> None:
    train(training.plan(ranks=2), training.settings(tmp_path, epochs=1), strategies=offered(), adapt=adapt)
    assert all("contains a run" in said for said in run_ranks(2, _again, tmp_path, "0", threads=1, timeout_s=120))
    assert run_ranks(2, _again, tmp_path, "1", threads=1, timeout_s=120) == ["0", "0"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    assert "continuing after step 6" in (tmp_path / "log.jsonl").read_text()
    # Restarted before anything was saved: from the beginning.
    assert run_ranks(2, _again, tmp_path / "new", "1", threads=1, timeout_s=120) == ["0", "0"]


def test_a_restart_that_no_agent_counts_resumes_what_the_same_agent_began(tmp_path: Path) -> None:
    """As where a node has come or left."""
    out = tmp_path / "run"
    assert run_ranks(2, _again, out, "0", 1, "7", threads=1, timeout_s=120) == ["0", "0"]
    (out / "agent").rename(tmp_path / "kept")
    assert all("contains a run" in said for said in run_ranks(2, _again, out, "0", 2, "7", threads=1, timeout_s=120))
    (tmp_path / "kept").rename(out / "agent")
    assert run_ranks(2, _again, out, "0", 2, "7", threads=1, timeout_s=120) == ["0", "0"]
    (out / "agent").write_text("another")
    assert all("contains a run" in said for said in run_ranks(2, _again, out, "0", 3, "7", threads=1, timeout_s=120))
