"""What a user does with GPUs, on the stand-in's: each in a process of its own, and what of it failed.

``python -m planner_tests.standin.scenarios LOG [NAME ...]`` prints one JSON document, by scenario null or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from planner_tests.standin import commands, loops, measuring, pieces, training
from planner_tests.standin.registry import SCENARIOS, apart

MODULES = (training, measuring, commands, loops, pieces)
"""Importing them enters what they hold; none imports torch or the package by that."""


def begin() -> None:
    """Have this process see the stand-in's GPUs, with the package marked and what is measured small."""
    from planner_tests.standin import sites, sizes, start

    start.load()
    sites.watch(Path(os.environ["STANDIN_LOG"]))
    sizes.shrink()


def main(log: Path, names: list[str]) -> None:
    """Run them; a scenario that takes too long has failed."""
    here = Path(__file__).parent
    os.environ |= {"OMP_NUM_THREADS": "1", "STANDIN_LOG": str(log), "STANDIN_ROOT": str(here.parents[1])}
    os.environ["PYTHONPATH"] = str(here / "site")
    os.environ.setdefault("STANDIN_GPUS", "2")
    sys.path.insert(0, str(here.parent))
    begin()
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="standin-") as root:
        os.environ["STANDIN_NCCL"] = root
        for name in names or SCENARIOS:
            folder = Path(root) / name
            folder.mkdir()
            began = time.monotonic()
            found[name] = apart(SCENARIOS[name], folder)
            told = "ok" if found[name] is None else "FAILED"
            print(f"{name}: {told} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
