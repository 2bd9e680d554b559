"""The search counts work, and waits no longer than it must."""

from __future__ import annotations

import os

import pytest

from asa.planner import clock


class _Told:
    """Stands in for the module ``time``: how long a thread has worked, and what a clock on the wall shows."""

    def __init__(self) -> None:
        self.worked, self.wall = 0.0, 100.0

    def thread_time(self) -> float:
        return self.worked

    def monotonic(self) -> float:
        return self.wall


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> _Told:
    """A clock that moves only when it is told to."""
    made = _Told()
    monkeypatch.setattr(clock, "time", made)
    monkeypatch.setattr(clock, "PATIENCE", 4)
    monkeypatch.setattr(clock, "_CLOCK", clock._WorkClock())
    return made


def test_waiting_counts_for_a_part_of_the_wall_only(told: _Told) -> None:
    told.worked, told.wall = told.worked + 0.1, told.wall + 10.0
    assert clock.now() == 10.0 / clock.PATIENCE


def test_work_counts_in_full(told: _Told) -> None:
    told.worked, told.wall = told.worked + 3.0, told.wall + 4.0
    assert clock.now() == 3.0
    told.worked, told.wall = told.worked + 1.0, told.wall + 1.0
    assert clock.now() == 4.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_copy_of_the_process_goes_on_where_the_clock_stood() -> None:
    before = clock.now()
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(sink, repr(clock.now()).encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as told:
        seen = float(told.read())
    os.waitpid(pid, 0)
    assert before <= seen < before + 60
