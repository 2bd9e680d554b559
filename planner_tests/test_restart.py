"""torchrun starts all ranks again by the same command: they go on from what they had saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import training
from started import COMMAND, together

from asa.errors import UsageError, WorkersFailedError
from asa.executor.model.votes import Votes
from asa.executor.running import run
from asa.executor.running.run import train
from asa.ir import codec
from asa.launch import TorchrunRank, run_ranks
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


def test_a_rank_that_is_lost_before_training_begins_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alone(Votes):
        def gather(self, values: Sequence[float]) -> list[list[float]]:
            raise RuntimeError("[/a/pair.cc:561] Connection closed by peer")

    @contextmanager
    def joined(**_: object) -> Iterator[TorchrunRank]:
        yield TorchrunRank(rank=0, num_ranks=2, local_rank=0)

    monkeypatch.setattr(run, "join", joined)
    monkeypatch.setattr(run, "_votes", lambda *_: Alone())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkersFailedError, match="another rank is gone"):
        train(training.plan(ranks=2), training.settings(tmp_path), strategies=offered(), adapt=adapt)


_AGENT = """
import os, subprocess, sys, time
from pathlib import Path
words = ("train", "plan.json", "--data", "digits", "--epochs", "100000", "--out", "run")
rank = subprocess.Popen([sys.executable, sys.argv[1], *words])
Path("pid").write_text(str(rank.pid))
while rank.poll() is None and not list(Path("run").glob("checkpoints/step_*")):
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process that its parent has ended")
def test_a_rank_saves_when_the_agent_that_started_it_is_gone(tmp_path: Path) -> None:
    codec.save(training.plan("logistic"), tmp_path / "plan.json")
    own = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}
    subprocess.run(
        [sys.executable, "-c", _AGENT, str(COMMAND)], cwd=tmp_path, env=os.environ | together(1) | own, timeout=240,
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 240
        while not (tmp_path / "run" / "result.json").is_file() and time.monotonic() < until:
            time.sleep(0.05)
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["exit_code"], result["status"]) == (75, "pre-empted")
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
