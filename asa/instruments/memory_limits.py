"""Memory that this process holds, and how much it may hold before an allocation fails or the process is killed."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from asa.ir import control_groups

_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A memory limit. ``used``: bytes of this process under ``limit``. ``full``: fraction in use, 0 to 1, by all
    processes.

    ``kind``: ``device`` (the allocator's peak of active memory), ``data`` and ``address`` (the process's own limits),
    ``group`` (its control group), ``host``.
    """

    kind: str
    used: int
    limit: int
    full: float


def tightest(device: torch.device, requested: int = 0) -> MemoryLimit | None:
    """The limit that is closest to being reached; if an allocation of ``requested`` bytes failed, one that it exceeds.
    None if the system reports no limits."""
    limits = limits_of(device)
    exceeded = [r for r in limits if r.used + requested > r.limit] if requested else []
    return max(exceeded or limits, key=lambda r: r.full, default=None)


def fullness(device: torch.device) -> float:
    """Largest fraction in use of any limit, 0 to 1; 0 if nothing is known."""
    return max((r.full for r in limits_of(device)), default=0.0)


def used_bytes(device: torch.device) -> dict[str, int]:
    """Bytes that this process holds now, by kind of limit, whether or not such a limit is set."""
    if device.type == "cuda":
        return {"device": torch.cuda.memory_allocated(device)}
    status = _numbers(Path("/proc/self/status"))
    resident = status.get("VmRSS", 0)
    return {"data": status.get("VmData", 0), "address": status.get("VmSize", 0), "host": resident, "group": resident}


def limits_of(device: torch.device) -> list[MemoryLimit]:
    """All memory limits that apply to a rank's allocations on ``device``."""
    if device.type == "cuda":
        return [_on_cuda(device)]
    used, limits = used_bytes(device), []
    resident = used["host"]
    for kind, resource_id in (("data", resource.RLIMIT_DATA), ("address", resource.RLIMIT_AS)):
        limit = resource.getrlimit(resource_id)[0]
        if limit != resource.RLIM_INFINITY and used[kind]:
            limits.append(MemoryLimit(kind=kind, used=used[kind], limit=limit, full=used[kind] / max(1, limit)))
    host = _numbers(Path("/proc/meminfo"))
    if host.get("MemTotal") and "MemAvailable" in host:
        limits.append(_shared("host", resident, host["MemTotal"] - host["MemAvailable"], host["MemTotal"]))
    group = _group()
    if group is not None and group[1] < host.get("MemTotal", 1 << 62):
        limits.append(_shared("group", resident, *group))
    return limits


def free_on_host() -> int | None:
    """Bytes that processes of this host can still allocate, limited by its memory and by the control group of this
    process; None if the system does not report it."""
    host = _numbers(Path("/proc/meminfo"))
    free = [host["MemAvailable"]] if "MemAvailable" in host else []
    group = _group()
    if group is not None:
        free.append(max(0, group[1] - group[0]))
    return min(free, default=None)


def _on_cuda(device: torch.device) -> MemoryLimit:
    """Limit of a CUDA device. The caching allocator frees its reserve before it fails, so the reserve counts as
    available."""
    free, _ = torch.cuda.mem_get_info(device)
    limit = free + torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return MemoryLimit(kind="device", used=peak, limit=limit, full=peak / max(1, limit))


def _shared(kind: str, own_bytes: int, all_used: int, limit: int) -> MemoryLimit:
    """A limit shared with other processes: the memory of this process plus what is free."""
    return MemoryLimit(
        kind=kind, used=own_bytes, limit=own_bytes + max(0, limit - all_used), full=all_used / max(1, limit)
    )


def _group() -> tuple[int, int] | None:
    """Bytes in use and limit of this process's control group (version 2 or 1), or of the fullest group that contains
    it.

    File caches do not count as in use; memory that processes share does.
    """
    for version, folders in control_groups.folders("memory"):
        limit_file, prefix = ("memory.limit_in_bytes", "total_") if version == 1 else ("memory.max", "")
        usages = []
        for folder in folders:
            try:
                limit = int((folder / limit_file).read_text())
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                used = int(stat[f"{prefix}rss" if version == 1 else "anon"]) + int(stat.get(f"{prefix}shmem", 0))
            except (OSError, ValueError, KeyError):
                continue  # "max", or the path is that of another namespace
            usages.append((used, limit))
        if usages:
            return max(usages, key=lambda each: each[0] / max(1, each[1]))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of the form ``Name:  123 kB``, in bytes."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: _KIB * int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def kernel_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory since boot; 0 if unknown."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
