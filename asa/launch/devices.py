"""Cores and devices of this machine, queried without making the process unfit to fork."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from asa.errors import UnavailableError
from asa.ir import control_groups

# Makes torch look for CUDA through NVML, since the CUDA runtime cannot be used after a fork once initialized.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


_shared: int | None = None
"""Number of cores that this process could use before it was bound to one."""


def usable_cores() -> int:
    """Number of cores that this process and its siblings may use: its affinity, not the machine's count, and no more
    than a quota of processor time gives it.

    If the process has bound itself to one core, this is the number before that.
    """
    if _shared is not None:
        return _shared
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), control_groups.cores())
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Model name of the processor, as the system reports it."""
    return _cpu_info("model name") or platform.processor() or platform.machine() or "cpu"


def is_virtual() -> bool:
    """Whether the cores belong to a virtual machine, as far as the processor reports it (x86 on Linux)."""
    return "hypervisor" in _cpu_info("flags").split()


def _cpu_info(field: str) -> str:
    """A field of Linux's description of the first processor; empty on other systems."""
    try:
        match = re.search(rf"^{field}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else ""


def bind_to_core(local_rank: int, ranks_here: int) -> None:
    """Bind this process to a core of its own, if there are as many cores as ranks on this machine.

    Other work on that core then slows down this rank only; unbound ranks would share the cores, and all would seem
    slow. Nothing is bound if there are more cores than ranks, because the system's scheduler then does better, or
    fewer.
    """
    global _shared
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == ranks_here > 1:
        os.sched_setaffinity(0, {cores[local_rank]})
        _shared = len(cores)


def default_threads(num_ranks: int) -> int:
    """Threads per rank if all ranks work at once: an equal share of the cores, at least one."""
    return max(1, usable_cores() // num_ranks)


def leave_device_out(index: int) -> None:
    """Hide the CUDA device of rank ``index`` from ranks that are started from now on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(cuda_devices())] if visible is None else visible.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name for i, name in enumerate(names) if i != index)


def cuda_devices() -> int:
    """Number of CUDA devices that ranks may use.

    Asks the management library, never the CUDA runtime: a process that has initialized CUDA cannot fork ranks that use
    it. Torch would ask the runtime for instances of MIG, of which CUDA shows a process only the first. Torch is not
    imported for this if the system shows no device.
    """
    if "torch" not in sys.modules and not _shows_devices():
        return 0
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if first.startswith("MIG-"):
        return int(_is_known(first))
    import torch

    return torch.cuda.device_count()


def _shows_devices() -> bool:
    """Whether there may be a device for CUDA or ROCm; False only on Linux without any of the files of their drivers."""
    shown = any(next(Path("/dev").glob(pattern), None) for pattern in ("nvidia*", "nvhost*", "kfd", "dxg"))
    return shown or sys.platform != "linux"


def check_cuda(needed: int, remedy: str) -> None:
    """Check that a plan for ``needed`` CUDA devices can run here. ``remedy``: what to do without a device.

    Raises:
        UnavailableError: there are fewer.
    """
    have = cuda_devices()
    if have < needed:
        devices = "CUDA device" if needed == 1 else "CUDA devices"
        remedy = f"plan with --gpus {have}, or {remedy}" if have else remedy
        raise UnavailableError(f"the plan needs {needed} {devices}, this machine has {have}; {remedy}")


def _is_known(uuid: str) -> bool:
    """Whether the management library knows a device by this identifier."""
    try:
        import pynvml

        pynvml.nvmlInit()
        pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except Exception:  # no library, no driver, or an unknown device
        return False
    return True
