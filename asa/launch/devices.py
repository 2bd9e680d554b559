"""What this machine has, asked in ways that leave the process fit to fork."""

from __future__ import annotations

import os

# With this, torch asks the management library whether there is CUDA; the runtime, once asked, survives no fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


_shared: int | None = None
"""Cores that this process could run on before it was bound to one of them."""


def usable_cores() -> int:
    """Cores for this process and those beside it (its affinity, not the machine's count), bound to one or not."""
    if _shared is not None:
        return _shared
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bind_to_core(local_rank: int, ranks_here: int) -> None:
    """Keep this process on a core of its own, where there are as many cores as ranks on this machine.

    Whatever else then has that core slows down this rank and no other: the system would have ranks take turns, and all
    would seem slow. With cores to spare it finds a better place than any rule; with too few, nobody has one.
    """
    global _shared
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == ranks_here > 1:
        os.sched_setaffinity(0, {cores[local_rank]})
        _shared = len(cores)


def default_threads(num_ranks: int) -> int:
    """Threads per rank when all ranks work at once: an equal share of the cores, at least one."""
    return max(1, usable_cores() // num_ranks)


def leave_device_out(index: int) -> None:
    """From here on ranks that are started see all CUDA devices but the one that rank ``index`` had."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(cuda_devices())] if seen is None else seen.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name for i, name in enumerate(names) if i != index)


def cuda_devices() -> int:
    """CUDA devices that ranks may use.

    Asks the management library, never the CUDA runtime: a process that has initialised CUDA can fork no rank that
    uses it.
    """
    import torch

    return torch.cuda.device_count()
