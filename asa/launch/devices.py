"""What this machine has, asked in ways that leave the process fit to fork."""

from __future__ import annotations

import os

# With this, torch asks the management library whether there is CUDA; the runtime, once asked, survives no fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def usable_cores() -> int:
    """Cores this process may run on (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
