"""The timing core: marks, spread, and when to stop repeating."""

from __future__ import annotations

import gc
import math
import time
from itertools import count

import pytest
import torch

from asa.ir.profile import Stat
from asa.profiler.clock import (
    HostClock,
    Repeats,
    clock_of,
    one_thread,
    quiet,
    relative_error,
    scaled,
    solo_clock_of,
    time_repeatedly,
)


def test_seconds_lie_between_neighbouring_marks():
    clock = HostClock()
    assert clock.seconds([1_000_000_000, 1_500_000_000, 3_500_000_000]) == [0.5, 2.0]
    first, second = clock.mark(), clock.mark()
    assert clock.seconds([first, second])[0] >= 0


def test_a_core_clock_counts_work_and_not_waiting():
    device = torch.device("cpu")
    core, wall = solo_clock_of(device), clock_of(device)
    waited = [core.mark(), wall.mark()]
    time.sleep(0.05)
    assert core.seconds([waited[0], core.mark()])[0] < 0.04
    assert wall.seconds([waited[1], wall.mark()])[0] >= 0.05
    started = core.mark()
    while core.seconds([started, core.mark()])[0] < 0.002:
        pass


def test_the_error_of_a_median_needs_three_samples_and_falls_with_more():
    assert math.isinf(relative_error([1.0, 1.0]))
    assert relative_error([1.0] * 3) == 0
    few, many = [0.9, 1.0, 1.1] * 3, [0.9, 1.0, 1.1] * 30
    assert 0 < relative_error(many) < relative_error(few) / 3


def test_one_interrupted_repeat_in_twenty_does_not_count():
    assert relative_error([1.0] * 19 + [50.0]) == 0


def _rounds(repeats: Repeats, value) -> int:
    samples: list[float] = []
    for n in count():
        if not repeats.goes_on([samples]):
            return n
        samples.append(value(n))
    raise AssertionError


@pytest.mark.parametrize(
    ("slice_s", "value", "expected"),
    [
        (100.0, lambda n: 1.0, 5),  # settled, judged at five samples at the earliest
        (0.0, lambda n: 1.0, 3),  # no time: the least
        (100.0, lambda n: 1.0 + n % 2, 12),  # never settles: the most
        (7.5, lambda n: 1.0 + n % 2, 6),  # never settles: out of time
    ],
)
def test_repeats_end_when_settled_out_of_time_or_at_the_most(slice_s, value, expected):
    ticks = count()
    assert _rounds(Repeats(slice_s=slice_s, least=3, most=12, now=lambda: float(next(ticks))), value) == expected


def test_repeats_wait_for_the_worst_series():
    repeats = Repeats(slice_s=1e9, most=100, now=lambda: 0.0)
    assert repeats.goes_on([[1.0] * 9, [1.0, 2.0] * 5])
    assert not repeats.goes_on([[1.0] * 9, [2.0] * 9])


def test_a_scaled_stat_keeps_its_shape():
    stat = scaled(Stat.of([1.0, 2.0, 3.0]), 2.0)
    assert (stat.p10, stat.median, stat.p90, stat.n) == (2.0, 4.0, 6.0, 3)


def test_the_collector_rests_inside_a_measurement_only():
    assert gc.isenabled()
    with quiet():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_threads_come_back():
    before = torch.get_num_threads()
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_work_is_warmed_up_and_repeated():
    calls: list[int] = []
    stat = time_repeatedly(lambda: calls.append(1), HostClock(), slice_s=0.0, warmups=2)
    assert stat.n == 3
    assert len(calls) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_time_the_device_and_the_host_apart():
    device = torch.device("cuda", 0)
    clock = clock_of(device)
    a = torch.randn(4096, 4096, device=device)
    (a @ a).sum().item()
    start = clock.mark()
    for _ in range(20):
        a @ a
    marks = [start, clock.mark()]
    assert clock.seconds(marks)[0] > clock.host_seconds(marks)[0] > 0
