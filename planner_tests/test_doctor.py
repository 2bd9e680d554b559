"""``asa doctor``: checks that can fail do, and what is shown is what was asked of the system."""

from __future__ import annotations

import resource
import shutil
import sys
from types import SimpleNamespace

import pytest

from asa.cli import places
from asa.cli.commands import doctor, system_checks
from asa.cli.console import Console
from asa.planner.stage import ilp
from asa.planner.stage.problem import Solution

CONSOLE = Console()


class NVMLError(Exception):
    """As pynvml has it."""


class Driver:
    """NVML of some GPUs: ``mig``, ``ecc`` and ``errors`` one a GPU, ``joined`` per pair: ``nvlink`` or a level."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_P2P_CAPS_INDEX_NVLINK = 1, 0, 2

    def __init__(self, mig, ecc, errors, joined=None):
        self.mig, self.ecc, self.errors, self.joined, self.running = mig, ecc, errors, joined or {}, False

    def nvmlInit(self):
        self.running = True

    def nvmlShutdown(self):
        self.running = False

    def nvmlDeviceGetCount(self):
        return len(self.mig)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMigMode(self, device):
        if self.mig[device] is None:
            raise NVMLError("not supported")
        return [self.mig[device], 0]

    def nvmlDeviceGetEccMode(self, device):
        return [self.ecc[device], 0]

    def nvmlDeviceGetTotalEccErrors(self, device, kind, counter):
        assert (kind, counter) == (1, 0)
        return self.errors[device]

    def nvmlDeviceGetP2PStatus(self, a, b, what):
        assert what == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if self.joined[a, b] == "nvlink" else 3

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return self.joined[a, b]


def driver(monkeypatch, *args):
    made = Driver(*args)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_the_solver_is_run_and_its_answer_looked_at(monkeypatch):
    assert doctor._solver(CONSOLE).ok
    monkeypatch.setattr(ilp, "solve", lambda *_, **__: Solution(choice=(0,), value=4.0, bound=4.0, solver="some"))
    assert "wrong answer" in doctor._solver(CONSOLE).detail

    def changed(*_, **__):
        raise TypeError("'list' object is not an instance of 'AffineExpr'")

    monkeypatch.setattr(ilp, "solve", changed)
    broken = doctor._solver(CONSOLE)
    assert (broken.ok, broken.needed) == (False, True)
    assert "AffineExpr" in broken.detail


def test_files_are_named_once_each(monkeypatch, tmp_path):
    shutil.copytree(places.SHIPPED, tmp_path / "profiles")
    shutil.copy(tmp_path / "profiles" / "cluster.local-gloo-2.json", tmp_path / "profiles" / "cluster.mine.json")
    monkeypatch.chdir(tmp_path)
    named = doctor._clusters(CONSOLE).detail.split(", ")
    assert len(named) == len(set(named)) > 2
    assert "profiles/cluster.mine.json" in named
    assert all(name.startswith("profiles/") or name.endswith("(shipped)") or "more" in name for name in named)


def test_a_link_to_a_shipped_file_is_not_another_file(monkeypatch, tmp_path):
    (tmp_path / "profiles").mkdir()
    for path in places.SHIPPED.glob("*.json"):
        (tmp_path / "profiles" / path.name).symlink_to(path.resolve())
    monkeypatch.chdir(tmp_path)
    assert len(places.clusters(CONSOLE)) == len(list(places.SHIPPED.glob("cluster.*.json")))
    assert not any(path.is_absolute() for path, _ in places.clusters(CONSOLE))


def test_what_is_too_small_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**26, used=0, free=2**26))
    shm = system_checks.shared_memory(CONSOLE)
    assert (shm.ok, system_checks.disk(CONSOLE).ok) == (False, False)
    assert "64.0 MiB" in shm.detail
    assert "--shm-size" in shm.fix
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    files = system_checks.open_files(CONSOLE)
    assert (files.ok, files.fix) == (False, "ulimit -n 4096")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "hard limit" in system_checks.open_files(CONSOLE).fix
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert system_checks.open_files(CONSOLE).ok


def test_free_memory_is_at_most_what_the_control_group_leaves(monkeypatch):
    monkeypatch.setattr("asa.instruments.memory_limits.free_on_host", lambda: 2**28)
    memory = doctor._memory(CONSOLE)
    assert memory.detail.startswith("256 MiB free of")
    assert not memory.ok


@pytest.mark.parametrize(("text", "ok"), [(None, True), ("1", True), ("0", False), ("4,2", False), ("100000", False)])
def test_threads(monkeypatch, text, ok):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert system_checks.threads(CONSOLE).ok is ok


def test_gpus_without_a_driver_are_no_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert system_checks.gpu_modes(CONSOLE).ok
    assert system_checks.topology(CONSOLE).ok


def test_mig_and_memory_errors_are_faults_and_ecc_is_none(monkeypatch):
    made = driver(monkeypatch, [0, None], [1, 0], [0, 0])
    good = system_checks.gpu_modes(CONSOLE)
    assert (good.ok, good.detail) == (True, "2: MIG off, ECC on for 0")
    assert not made.running
    driver(monkeypatch, [1, 0], [1, 1], [0, 0])
    assert system_checks.gpu_modes(CONSOLE).detail == "2: MIG on for 0, ECC on"
    assert not system_checks.gpu_modes(CONSOLE).ok
    driver(monkeypatch, [0, 0], [1, 1], [0, 3])
    assert "GPU 1: 3 uncorrected" in system_checks.gpu_modes(CONSOLE).detail
    assert not system_checks.gpu_modes(CONSOLE).ok


def test_pairs_of_gpus_by_what_joins_them(monkeypatch):
    driver(monkeypatch, [0] * 3, [0] * 3, [0] * 3, {(0, 1): "nvlink", (0, 2): 30, (1, 2): 30})
    assert system_checks.topology(CONSOLE).detail == "pairs of GPUs: 1 over NVLink, 2 over the host bridge"
    assert system_checks.topology(CONSOLE).ok
    driver(monkeypatch, [0] * 2, [0] * 2, [0] * 2, {(0, 1): 50})
    assert not system_checks.topology(CONSOLE).ok
    driver(monkeypatch, [0], [0], [0])
    assert "nothing to join" in system_checks.topology(CONSOLE).detail
