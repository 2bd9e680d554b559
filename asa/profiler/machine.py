"""The measured device: its name, and the memory that one rank may use."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from asa.errors import UnavailableError, UsageError
from asa.instruments.memory_limits import free_on_host
from asa.ir.profile import DeviceRecord, Precision
from asa.launch import cuda_devices, usable_cores
from asa.launch.devices import cpu_name, is_virtual

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def choose_device(name: str) -> torch.device:
    """The torch device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: any other name.
        UnavailableError: ``cuda`` on a machine without a usable CUDA device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; one of auto, cpu, cuda")
    if name == "cpu":
        return torch.device("cpu")
    if cuda_devices():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise UnavailableError("no CUDA device is usable here; choose --device cpu")
    return torch.device("cpu")


def require_precision(device: torch.device, precision: Precision) -> None:
    """Check that the device can train in ``precision``.

    Raises:
        UnavailableError: bf16 on a GPU that only emulates it, slower than fp32; tf32 on a device without it.
    """
    if precision == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise UnavailableError(f"{name} has no TF32; choose --precision fp32")
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UnavailableError(f"{torch.cuda.get_device_name(device)} has no bf16; choose --precision fp16")


def device_record(device: torch.device) -> DeviceRecord:
    """``device`` in the form used by profiles and clusters. A CPU's memory is divided equally among its cores, because
    a rank has one core."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceRecord(type="cuda", name=properties.name, memory_bytes=properties.total_memory, threads=1)
    memory = total_memory() // usable_cores()
    return DeviceRecord(type="cpu", name=cpu_name(), memory_bytes=memory, threads=1, virtual=is_virtual())


def total_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or the limit of its control group if that is
    less."""
    return min([int(psutil.virtual_memory().total), *_cgroup_limits()])


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    known = free_on_host()
    return min([int(psutil.virtual_memory().available), *_cgroup_limits(), *([] if known is None else [known])])


def _cgroup_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return limits
