"""Out of memory, said so: what was promised, what there is, and what to do. A rank that runs out of it in the middle
of a step cannot ask the others, which wait for its gradients: it ends the run, and the last checkpoint is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asa.errors import WorkersFailedError
from asa.ir.plan import Plan
from asa.ir.units import GIB


def is_exhaustion(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def explained(plan: Plan, rank: int, device: torch.device, step: int) -> Iterator[None]:
    """Inside, running out of memory becomes one line with a remedy.

    Raises:
        WorkersFailedError: memory ran out on this rank.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_exhaustion(error):
            raise
        predicted = plan.prediction.memory_bytes_per_rank
        promised = f"{predicted[rank] / GIB:.2f} GiB" if rank < len(predicted) else "no figure"
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            used = torch.cuda.max_memory_allocated(device)
            others = total - free - torch.cuda.memory_reserved(device)
            there = f"{used / GIB:.2f} GiB were in use of {total / GIB:.2f} GiB, {others / GIB:.2f} GiB by others"
            remedy = f"plan again with --memory {max(0.1, 0.9 * (total - others) / GIB):.1f}"
        else:
            there, remedy = "the host has no more", "plan again with a lower --memory, or with fewer --gpus here"
        raise WorkersFailedError(
            f"rank {rank} ran out of memory in step {step}: the plan promised {promised}, {there}; {remedy}, then "
            "--resume",
            rank=rank,
        ) from error
