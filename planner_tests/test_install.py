"""The built wheel, in fresh environments outside of this folder (`make test-install` does it for every Python)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MISSING, UNREACHED = 5, 69


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a clone and git")
def test_the_wheel_plans_in_an_empty_folder() -> None:
    """With the newest and the lowest dependencies, on the Python whose PuLP is another one than here."""
    program, env = ROOT / "benchmarks" / "install.sh", os.environ | {"BIN": str(Path(sys.executable).parent)}
    run = subprocess.run(
        ["bash", str(program), "3.12"], env=env, capture_output=True, text=True, timeout=900, check=False
    )  # fmt: skip
    if run.returncode in (MISSING, UNREACHED):
        pytest.skip(f"no Python 3.12 here, or no package index: {run.stderr[-300:]}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok: Python 3.12") == 2
