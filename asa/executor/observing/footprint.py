"""Memory of a rank: the peak of active memory in one step, counted like the planner's prediction, and its lasting
state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from asa.executor.model.offload import updated_in
from asa.executor.training.worker import Worker
from asa.instruments.allocations import bytes_of, completed, peak, recording
from asa.sharding.split.local_parts import local


def active_peak(worker: Worker, step: Callable[[], object]) -> int:
    """Peak of active memory in bytes while ``step`` trains ``worker`` for one step, lasting state included. If batches
    are in flight between steps, ``step`` is called several times."""
    with peak_recorded(worker) as read:
        for _ in range(recorded_steps(worker)):
            step()
    return read()


def recorded_steps(worker: Worker) -> int:
    """Number of steps over which the peak of ``worker`` is recorded."""
    return 1 if worker.conduct is None else worker.conduct.recorded_steps


@contextmanager
def peak_recorded(worker: Worker) -> Iterator[Callable[[], int]]:
    """Context for :func:`recorded_steps` steps of ``worker``. The function that it yields returns, after the context
    has ended, the peak of active memory in bytes, lasting state included.

    On CUDA it comes from the allocator's statistics; on a CPU, from the tensors that outlive a step and the recorded
    allocations. Those of threads that answer other ranks are not recorded; the most bytes that they held are added.
    """
    model = worker.model
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: int(torch.cuda.max_memory_allocated(device))
        return
    conduct = worker.conduct
    held = [] if conduct is None else conduct.held()
    # A bucket is not used again while other references to it exist, so none is kept here.
    base = bytes_of(map(local, (*_lasting(worker), *held)))
    model.zero_grad()

    def read_peak() -> int:
        gradients = (local(p.grad) for p in (*model.parameters(), *held) if p.grad is not None)
        own = peak(completed(read()[0], {g.untyped_storage().data_ptr() for g in gradients}))
        return base + own + (0 if conduct is None else conduct.answering_bytes())

    with recording(device) as read:
        yield read_peak


def state_bytes(worker: Worker) -> int:
    """Bytes that a rank keeps on its device between steps: weights, buffers, gradients and optimizer state."""
    gradients = [p.grad for p in worker.model.parameters() if p.grad is not None]
    return bytes_of(map(local, (*_lasting(worker), *gradients)))


def _lasting(worker: Worker) -> list[torch.Tensor]:
    """Tensors on a rank's device that outlive a step: weights, buffers, optimizer state, and buckets of
    communication, of which gradients are views. Other gradients are released by a step."""
    model = worker.model
    # On the host, even if the device uses the same memory.
    on_host = {updated_in(worker.optimizer, p) for p in model.offloaded}
    states = [s for p, s in worker.optimizer.state.items() if p not in on_host]
    lasting = [*model.parameters(), *(b for c in model.components for b in c.buffers())]
    lasting += [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
    return [*lasting, *model.buckets()]
