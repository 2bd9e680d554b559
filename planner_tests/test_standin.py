"""Everything that asks for CUDA runs, on GPUs that are stood in for: torch's own CUDA code over main memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from standin import sites, start

QUICK = ("trains_tensor_parallel", "profiles_what_the_device_cannot_hold", "refuses_what_the_devices_cannot")
"""What every run of the tests does; ``make standin`` does all."""

_THINKS = "asks a plan or a cluster of CUDA devices, not a device: tests of planning and reports plan for such"
_HOST = "numbers of samples are the host's in every run: the guard keeps a device from being waited for"
_WITHOUT_NCCL = "asa/profiler/interconnect.py: line raise UnavailableError('this torch has no nccl; measure with gloo')"
EXCEPTIONS = {
    "asa/cost/memory/peak.py: device.type == 'cpu'": _THINKS,
    "asa/cost/machine/widen.py: cluster.device.type == 'cpu'": _THINKS,
    "asa/executor/consistency/hogwild.py: model.device.type != 'cpu'": "hogwild is refused before a rank starts",
    "asa/executor/measuring/emulation.py: profile.device.type == 'cuda'": "an emulated GPU sleeps: tests of emulation",
    "asa/executor/model/parallel.py: samples.device.type == 'cpu'": _HOST,
    "asa/executor/running/recovery.py: job.device_type == 'cpu'": "the kernel kills for the host's memory alone",
    "asa/launch/devices.py: line return 0": "a process without torch and without files of a driver: test_cli",
    _WITHOUT_NCCL: "a torch with CUDA has NCCL where the stand-in can be built",
    "asa/planner/decide.py: plan.device_type == 'cuda'": _THINKS,
    "asa/planner/space/consistency.py: cluster.device.type != 'cpu'": _THINKS,
    "asa/planner/space/baselines.py: cluster.device.type == 'cpu'": _THINKS,
    "asa/report/snippets/accelerate.py: plan.device_type == 'cpu'": _THINKS,
    "asa/report/snippets/script.py: plan.device_type == 'cuda'": _THINKS,
    "asa/scheduler/memory.py: cluster.device.type == 'cpu'": _THINKS,
}
"""Places that the stand-in cannot reach, and why: ``file: expression``."""


def _run(log: Path, *names: str) -> tuple[set[str], str]:
    """The places reached by the scenarios called so, all of them where none is named; and what failed of these."""
    try:
        start.built()
    except start.Missing as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "planner_tests.standin.scenarios", str(log), *names],
        capture_output=True, text=True, timeout=5400, cwd=sites.ROOT.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed = {name: error for name, error in json.loads(done.stdout.splitlines()[-1]).items() if error}
    return set(log.read_text().splitlines()), "\n".join(f"{name}: {error}" for name, error in failed.items())


def test_a_gpu_that_is_stood_in_for_profiles_trains_and_refuses(tmp_path: Path) -> None:
    reached, failed = _run(tmp_path / "sites", *QUICK)
    assert not failed, failed
    known = set(sites.sites())
    assert reached <= known, reached - known
    assert len(reached) > len(known) / 3, f"{len(reached)} of {len(known)}"


def test_every_excused_place_is_there() -> None:
    places = {sites.named(site) for site in sites.sites()}
    assert places >= EXCEPTIONS.keys(), EXCEPTIONS.keys() - places


@pytest.mark.standin
@pytest.mark.timeout(5700)
def test_every_place_that_asks_for_cuda_is_reached(tmp_path: Path) -> None:
    (reached, failed), known = _run(tmp_path / "sites"), sites.sites()
    missed = [s for s in known if s not in reached and sites.named(s) not in EXCEPTIONS]
    stale = EXCEPTIONS.keys() - {sites.named(s) for s in known if s not in reached}
    for kind, here in (("places that ask for CUDA", False), ("lines that only CUDA reaches", True)):
        every = [s for s in known if sites.is_line(s) == here]
        ran = sum(s in reached for s in every)
        excused = sum(sites.named(s) in EXCEPTIONS for s in every if s not in reached)
        print(f"{ran} of {len(every)} {kind} were reached, {excused} are excused by name")
    assert not failed, failed
    assert not missed, "\n".join(missed) + f"\nand reached after all, or gone: {stale}"
    assert not stale, f"reached after all, or gone: {stale}"
