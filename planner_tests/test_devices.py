"""How busy devices are: a stand-in for NVML that changes nothing, and the processor time of this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from asa.instruments import devices
from asa.instruments.devices import watched
from asa.instruments.nvml import card, reasons


class FakeNvml:
    """One GPU: it draws 200 W, is 80 % busy, and is held down by heat. Calls that set something do not exist."""

    NVMLError = RuntimeError

    def __init__(self, *, lacking: tuple[str, ...] = ()) -> None:
        self.now, self.open, self.lacking = 0.0, 0, lacking

    def __getattr__(self, name: str):
        if not name.startswith(("nvmlInit", "nvmlShutdown", "nvmlDeviceGet")):
            raise AttributeError(name)
        answers = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._refuse,
            "nvmlDeviceGetComputeRunningProcesses": lambda h: [],
            "nvmlDeviceGetTotalEnergyConsumption": lambda h: 200e3 * self.now,
            "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=80),
            "nvmlDeviceGetClockInfo": lambda h, kind: 1200,
            "nvmlDeviceGetMaxClockInfo": lambda h, kind: 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda h: 0x20 | 0x1,
        }
        return self._refuse if name in self.lacking else answers[name]

    def _refuse(self, *about: object) -> None:
        raise RuntimeError("not supported")

    def _count(self, by: int) -> None:
        self.open += by


@pytest.fixture
def nvml(monkeypatch):
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_a_gpu_tells_what_it_did(nvml, monkeypatch):
    monkeypatch.setattr(devices.time, "monotonic", lambda: nvml.now)
    with watched(card("GPU-1")) as usage:
        nvml.now = 3.0
    assert usage.busy == pytest.approx(0.8)
    assert (usage.seconds, usage.energy_j) == (3.0, 600.0)
    assert usage.clock_mhz == 1200
    assert reasons(usage.throttled) == ("heat",), "idle is no throttling"


def test_what_a_gpu_does_not_tell_is_unknown(nvml):
    nvml.lacking = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates")
    with watched(card("GPU-1")) as usage:
        pass
    assert usage.busy is None
    assert usage.energy_j is None
    assert usage.clock_mhz == 1200


def test_without_nvml_nothing_is_known_and_nothing_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert card("GPU-1") is None


@pytest.mark.parametrize(("threads", "busy"), [(1, 0.9), (2, 0.45)])
def test_a_process_that_works_is_busy_and_one_that_sleeps_is_not(monkeypatch, threads, busy):
    clock = {"monotonic": 0.0, "process_time": 0.0}
    monkeypatch.setattr(devices.time, "monotonic", lambda: clock["monotonic"])
    monkeypatch.setattr(devices.time, "process_time", lambda: clock["process_time"])
    monkeypatch.setattr(devices.torch, "get_num_threads", lambda: threads)
    with watched() as works:
        clock = {"monotonic": 1.0, "process_time": 0.9}
    with watched() as sleeps:
        clock = {"monotonic": 2.0, "process_time": 0.9}
    assert (works.busy, sleeps.busy) == (busy, 0.0)


def test_reasons_are_those_that_hold_a_clock_back():
    assert reasons(0) == reasons(0x1) == ()
    assert reasons(0x4 | 0x20 | 0x40) == ("the power limit", "heat")
