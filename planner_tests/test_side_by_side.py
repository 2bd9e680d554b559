"""Two processes share the files of the suite: each is run, and by one of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import side_by_side

HERE = Path(__file__).resolve().parent


class Session:
    """What the loop needs of pytest's: items that note who ran them, and failures that stop it."""

    Failed = Interrupted = RuntimeError

    def __init__(self, ran: list[tuple[str, str | None]], files: list[str]) -> None:
        self.testsfailed, self.shouldfail, self.shouldstop = 0, "", ""
        self.config = SimpleNamespace(option=SimpleNamespace(collectonly=False), hook=self)
        names = [f"{file}::{i}" for file in files for i in range(2)]
        self.ran = ran
        self.items = [SimpleNamespace(nodeid=n, path=HERE / n.split("::")[0], config=self.config) for n in names]

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self.ran.append((item.nodeid, nextitem and nextitem.nodeid))


def test_every_file_is_taken_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str | None]] = []
    first, second = Session(ran, ["a.py", "b.py", side_by_side.LONGEST[0]]), Session(ran, ["a.py", "c.py"])
    monkeypatch.delenv(side_by_side.TAKEN, raising=False)
    assert side_by_side.take_turns(first) is None, "pytest's own loop, as ever"  # type: ignore[arg-type]
    monkeypatch.setenv(side_by_side.TAKEN, str(tmp_path))
    assert side_by_side.take_turns(first)  # type: ignore[arg-type]
    assert side_by_side.take_turns(second)  # type: ignore[arg-type]
    longest = side_by_side.LONGEST[0]
    assert ran == [
        pair for f in (longest, "a.py", "b.py", "c.py") for pair in ((f"{f}::0", f"{f}::1"), (f"{f}::1", None))
    ]
    first.shouldfail = "stopping after 1 failures"
    (tmp_path / "a.py").unlink()
    with pytest.raises(RuntimeError, match="after 1 failures"):
        side_by_side.take_turns(first)  # type: ignore[arg-type]


def test_the_longest_files_are_there() -> None:
    assert all((HERE / name).is_file() for name in side_by_side.LONGEST)


def test_the_worst_exit_code_is_the_whole_one_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    calls = iter((["-c", "echo beside; exit 1"], ["-c", "exit 0"]))
    real = side_by_side.subprocess.Popen
    monkeypatch.setattr(side_by_side.subprocess, "Popen", lambda command, **k: real(["/bin/sh", *next(calls)], **k))
    assert side_by_side.main([]) == 1
    assert "beside it:\nbeside" in capsys.readouterr().out
