"""Devices of several kinds: what their times say of how fast they are. No machine of such is needed for that."""

from __future__ import annotations

import pytest
import torch

from asa.ir.cluster import Contention, RankDevice
from asa.launch import run_ranks
from asa.profiler import unequal
from asa.profiler.clock import clock_of
from asa.profiler.interference import Kernels
from asa.profiler.machine import device_record


def test_speeds_are_of_kinds_and_against_the_first():
    names = [("fast", 80), ("fast", 80), ("slow", 16), ("slow", 16)]
    seconds = [[1.0, 2.0, 4.0], [1.1, 2.2, 4.4], [2.0, 4.0, 8.0], [2.0, 4.2, 8.0]]
    found = unequal.described(names, seconds)
    assert [(d.name, d.speed, d.memory_bytes) for d in found] == [
        ("fast", 1.0, 80), ("fast", 1.0, 80), ("slow", 0.5, 16), ("slow", 0.5, 16),
    ]  # fmt: skip
    one_kernel = unequal.described([("a", 1), ("b", 1)], [[1.0, 1.0], [4.0, 1.0]])
    assert one_kernel[1].speed == 0.5


def test_contention_is_not_blamed_for_slow_devices():
    devices = (RankDevice(name="a", speed=1.0), RankDevice(name="b", speed=0.5))
    found = unequal.without_speeds(
        (Contention(ranks=1, slowdown=1.0), Contention(ranks=2, slowdown=2.4, memory_slowdown=1.5)), devices
    )
    assert [c.slowdown for c in found] == [1.0, pytest.approx(1.2)]
    assert found[1].of_memory == 1.0


def _measured(_rank: int) -> object:
    device = torch.device("cpu")
    return unequal.measure_devices(device, device_record(device), clock_of(device))


def _turns(_rank: int) -> list[list[float]]:
    device = torch.device("cpu")
    return unequal._seconds(device, clock_of(device))


def test_equal_ranks_record_nothing():
    assert run_ranks(2, _measured, backend="gloo", threads=1, timeout_s=120) == [None, None]


def test_all_ranks_learn_what_each_took_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unequal, "_ROUNDS", 1)
    monkeypatch.setattr(unequal, "_SAMPLE_S", 1e-6)
    adding = Kernels(work={"one": lambda: sum(range(100)), "other": lambda: sum(range(200))})
    monkeypatch.setattr(unequal, "training_kernels", lambda *_: adding)
    one, other = run_ranks(2, _turns, backend="gloo", threads=1, timeout_s=120)
    assert one == other
    assert len(one) == 2
    assert all(s > 0 for row in one for s in row)
