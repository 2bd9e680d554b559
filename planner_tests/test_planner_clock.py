"""The search counts work, and waits no longer than it must."""

from __future__ import annotations

import os
import time

import pytest

from asa.planner import clock


def test_waiting_counts_for_a_part_of_the_wall_only() -> None:
    began, worked, wall = clock.now(), time.thread_time(), time.monotonic()
    time.sleep(0.1)
    taken, worked, wall = clock.now() - began, time.thread_time() - worked, time.monotonic() - wall
    assert wall / clock.PATIENCE * 0.99 <= taken <= worked + wall / clock.PATIENCE * 1.01
    assert taken < 0.6 * wall


def test_work_counts_in_full() -> None:
    began, worked = clock.now(), time.thread_time()
    while time.thread_time() - worked < 0.02:
        pass
    assert clock.now() - began >= 0.02


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
