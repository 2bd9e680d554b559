"""Everything that asks for CUDA runs, on GPUs that are stood in for: torch's own CUDA code over main memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from standin import sites, start


def test_what_users_do_with_gpus_runs_on_the_stand_in(tmp_path: Path) -> None:
    try:
        start.built()
    except start.Missing as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "planner_tests.standin.scenarios", str(tmp_path / "sites")],
        capture_output=True, text=True, timeout=500, cwd=sites.ROOT.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed = {name: error for name, error in json.loads(done.stdout.splitlines()[-1]).items() if error}
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
