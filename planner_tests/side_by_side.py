"""The suite in as many processes as there are cores, at most two; each takes the next file that none has taken.

    python planner_tests/side_by_side.py [options of pytest, no files]

Most tests keep one core busy and those of ranks two, so that a second process fills what the first leaves. Files are
taken whole, the longest first; ends with pytest's exit code, the worst of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MOST = 2
TAKEN = "PLANNER_TESTS_TAKEN"
"""Variable: the folder that holds an empty file for every file of tests that some process has taken."""

LONGEST = (
    "test_equivalence.py",
    "test_train.py",
    "test_cli_real.py",
    "test_strategy_contract.py",
    "test_verify_plans.py",
    "test_zoo_models.py",
)
"""Files that take long, so that none of them is left for the end; the others follow in the order of their names."""


def take_turns(session: pytest.Session) -> bool | None:
    """The hook ``pytest_runtestloop`` of such a process; does nothing in any other."""
    folder = os.environ.get(TAKEN)
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    for items in _files(session.items):
        if not _take(Path(folder) / items[0].path.name):
            continue
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def _files(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """The tests of each file, in the order in which files are taken."""
    found: dict[str, list[pytest.Item]] = {name: [] for name in LONGEST}
    for item in items:
        found.setdefault(item.path.name, []).append(item)
    yield from filter(None, found.values())


def _take(path: Path) -> bool:
    """Whether it is this process that takes the file."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(options: list[str]) -> int:
    """Run, and pass on what the processes print: the first one's at once, the others' at the end."""
    count = min(MOST, os.cpu_count() or 1)
    beside: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken"
        taken.mkdir()
        environment = {**os.environ, TAKEN: str(taken)}
        command = [sys.executable, "-m", "pytest", *options]
        logs = [Path(folder) / f"{i}.log" for i in range(1, count)]
        try:
            for log in logs:
                with log.open("wb") as out:
                    beside.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            codes = [subprocess.run(command, env=environment, check=False).returncode]
            for process, log in zip(beside, logs, strict=True):
                codes.append(process.wait())
                print(f"\nbeside it:\n{log.read_text(errors='replace')}", flush=True)
        finally:
            for process in beside:
                process.kill()
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
