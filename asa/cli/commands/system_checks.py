"""Checks of ``asa doctor`` on the system: shared memory, open files, threads, disk, modes of the GPUs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from asa.cli.console import Console
from asa.instruments import nvml
from asa.launch import usable_cores
from asa.report.text.checks import Check
from asa.report.units import size

_SHARED_BYTES = 2**30
"""Recommended bytes of shared memory: containers get 64 MiB by default; NCCL and data loaders need more."""
_FILES = 1024
_DISK_BYTES = 2 * 2**30


def driver() -> bool:
    """Whether the kernel has loaded a driver for NVIDIA's GPUs; needs no torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/dxg").exists()


def shared_memory(_: Console) -> Check:
    """Check the space in ``/dev/shm``, which ranks and data loaders of one machine use to exchange data."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(name="shm", ok=True, detail="no /dev/shm on this system", needed=False)
    usage = shutil.disk_usage(folder)
    return Check(
        name="shm",
        ok=usage.free >= _SHARED_BYTES,
        detail=f"{size(usage.free)} free of {size(usage.total)} in /dev/shm",
        needed=False,
        fix="in a container start it with --shm-size 8g or --ipc host",
    )


def open_files(_: Console) -> Check:
    """Check how many files a process may have open; sockets between ranks count as files."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return Check(
        name="files",
        ok=unlimited or soft >= _FILES,
        detail="no limit of open files" if unlimited else f"{soft} open files a process",
        needed=False,
        fix="let root raise the hard limit, which is as low"
        if hard == soft
        else f"ulimit -n {hard if 0 < hard < 65536 else 65536}",
    )


def threads(_: Console) -> Check:
    """Check ``OMP_NUM_THREADS``, which sets the number of threads per rank under a launcher."""
    text, have = os.environ.get("OMP_NUM_THREADS"), usable_cores()
    if text is None:
        return Check(name="threads", ok=True, detail="OMP_NUM_THREADS is not set: ranks share the cores", needed=False)
    ok = text.isdecimal() and 0 < int(text) <= have
    fix = f"it is no number from 1 to the {have} usable cores; unset OMP_NUM_THREADS"
    return Check(name="threads", ok=ok, detail=f"OMP_NUM_THREADS={text}", needed=False, fix=fix)


def disk(_: Console) -> Check:
    """Check the space in the working directory, where profiles and runs are written."""
    free = shutil.disk_usage(Path.cwd()).free
    if not os.access(Path.cwd(), os.W_OK | os.X_OK):
        detail, fix = f"{Path.cwd()} cannot be written", "change to a folder of your own: profiles and runs go there"
        return Check(name="disk", ok=False, detail=detail, needed=False, fix=fix)
    fix = "checkpoints need room: free some, or change to another folder"
    return Check(name="disk", ok=free >= _DISK_BYTES, detail=f"{size(free)} free here", needed=False, fix=fix)


def gpu_modes(_: Console) -> Check:
    """Check MIG and ECC of every GPU, memory errors since boot, and other processes on it; nothing is changed."""
    with nvml.opened() as n:
        if n is None:
            return _without_nvml()
        every = nvml.handles(n)
        split = [i for i, h in enumerate(every) if nvml.query(n, (0, 0), "nvmlDeviceGetMigMode", h)[0]]
        checked = [i for i, h in enumerate(every) if nvml.query(n, (0, 0), "nvmlDeviceGetEccMode", h)[0]]
        kind = (n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC)
        counts = [nvml.query(n, 0, "nvmlDeviceGetTotalEccErrors", h, *kind) for h in every]
        errors = {i: count for i, count in enumerate(counts) if count}
        now = [nvml.Card(n, h).read() for h in every]
    parts = [f"MIG {_which(split, every)}", f"ECC {_which(checked, every)}"]
    parts += [f"GPU {i}: {e} uncorrected memory errors" for i, e in errors.items()]
    parts += [f"GPU {i}: {r.others} processes" for i, r in enumerate(now) if r.others]
    parts += [f"GPU {i}: held back by {' and '.join(r.reasons)}" for i, r in enumerate(now) if r.reasons]
    fix = "take such a GPU out of service" if errors else "a process sees one MIG instance: give ranks whole GPUs"
    ok = not split and not errors
    return Check(name="gpus", ok=ok, detail=f"{len(every)}: {', '.join(parts)}", needed=False, fix=fix)


def _without_nvml() -> Check:
    """Result without NVML: there is no GPU, or the library is missing."""
    if not Path("/dev/nvidiactl").exists():
        return Check(name="gpus", ok=True, detail="no NVIDIA driver, so no MIG and no ECC", needed=False)
    detail = "there is a driver, but NVML does not answer: clocks, energy and other processes are not seen"
    return Check(name="gpus", ok=False, detail=detail, needed=False, fix="pip install nvidia-ml-py")


def topology(_: Console) -> Check:
    """Check the connection of each pair of GPUs: NVLink, or the level of PCIe at which they meet."""
    links = nvml.topology()
    fix = "GPUs of several NUMA nodes exchange data slowly: measure with `asa cluster measure`"
    ok = "several NUMA nodes" not in links
    detail = links or "fewer than two GPUs: nothing to join"
    return Check(name="topology", ok=ok, detail=detail, needed=False, fix=fix)


def _which(indices: list[int], handles: list[Any]) -> str:
    """Description of the GPUs in ``indices``: off, on, or on for some."""
    return "off" if not indices else "on" if len(indices) == len(handles) else f"on for {', '.join(map(str, indices))}"
