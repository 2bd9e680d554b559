"""Weights in shared memory of one host, to which all workers write without locks (``hogwild``).

After Recht et al. 2011, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent". A worker reads
what the others have written so far. Two workers that write at the same time may overwrite a part of each other's
update. Each worker has its own momentum, lower than the run's, as with asynchronous servers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from asa.errors import UnavailableError, UsageError
from asa.executor.consistency.conduct import Conduct
from asa.executor.consistency.flat_parameters import FlatParameters
from asa.executor.consistency.parameter_servers import average_over_star
from asa.executor.consistency.server import Raise, lower_momentum, momentum_changes
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.ir.consistency import Discipline


class SharedWeights(Conduct):
    """Implements ``hogwild``."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer, votes: StarVotes) -> None:
        super().__init__(discipline, model, optimizer)
        if model.device.type != "cpu" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            raise UsageError(
                f"{discipline.name} needs CPU ranks on one host, which share its memory; ps_async runs without"
            )
        self._votes, self._flat = votes, FlatParameters(optimizer)
        flat = self._mapped()
        at = 0
        with torch.no_grad():
            for p, size in zip(self._flat.parameters, self._flat.sizes, strict=True):
                view = flat[at : at + size].view_as(p)
                if votes.rank == 0:
                    view.copy_(p)
                p.data = view
                at += size
        self._wait_for_all()
        self.changes = momentum_changes(discipline, optimizer, len(model.processes))
        self._peaks = [self._lowered(dict(group)).most for group in optimizer.param_groups]

    def _wait_for_all(self) -> None:
        """Wait for all workers, unless this process takes the place of a lost one, for which nobody waits."""
        if not self._votes.late:
            self._votes.gather([0.0])

    def _mapped(self) -> torch.Tensor:
        """Shared memory for all weights, mapped by every worker (collective, except for a process that comes late).

        On Linux it is a file without a name, which processes find as an open file of rank 0, and which is gone with the
        last of them. Elsewhere it has a name until all have mapped it.
        """
        if self._votes.late:
            return self._map(self._votes.stored_value())
        name, error = "", ""
        if self._votes.rank == 0:
            try:
                if hasattr(os, "memfd_create"):
                    handle = os.memfd_create("asa-hogwild")
                    name = f"/proc/{os.getpid()}/fd/{handle}"
                else:
                    handle, name = tempfile.mkstemp(prefix="asa-hogwild-")
                size = self._flat.total * self._flat.parameters[0].element_size()
                os.truncate(handle, size)
                if hasattr(os, "posix_fallocate"):  # else the rank that first writes where no memory is left is killed
                    os.posix_fallocate(handle, 0, size)
                self._votes.store_value(name)
                weakref.finalize(self, os.close, handle)
            except OSError as failure:
                error = (
                    f"no memory for {self._flat.total} weights that ranks share: {failure.strerror}; let this process "
                    "have more, or train under ps_async"
                )
                if name:
                    _unlink(name)
                    os.close(handle)
        name, error = self._votes.tell([name, error])
        if error:
            raise UnavailableError(error)
        flat = self._map(name)
        self._votes.gather([0.0])
        if self._votes.rank == 0:
            _unlink(name)
        return flat

    def _map(self, name: str) -> torch.Tensor:
        return torch.from_file(name, shared=True, size=self._flat.total, dtype=self._flat.dtype)

    def begin(self) -> None:
        """Wait for all workers. The weights are already shared."""
        self._wait_for_all()

    def step(self, batch: int) -> None:
        """Update the shared weights, with a learning rate in proportion to this worker's samples."""
        self._flat.check_trained(self.discipline)
        share = self.rows(batch) / self.model.plan.global_batch
        self.unscale(batch)
        groups = self.optimizer.param_groups
        usual: list[dict[str, Any]] = [{k: g[k] for k in ("lr", "momentum") if k in g} for g in groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            raised = replace(self._lowered(group), most=peak)
            group["lr"] = raised.of(group["lr"]) * share
        self.optimizer.step()
        for group, values in zip(groups, usual, strict=True):  # a checkpoint has the run's own
            group.update(values)

    def _lowered(self, group: dict[str, Any]) -> Raise:
        return lower_momentum(group, self.discipline, len(self.model.processes))

    def synchronize(self) -> None:
        """Wait until no worker writes, and average running statistics (collective)."""
        self._votes.gather([0.0])
        average_over_star(self.model, self._votes)


def _unlink(name: str) -> None:
    """Remove the file ``name``, unless it is an open file of a process, which has no other name."""
    if not name.startswith("/proc/"):
        with contextlib.suppress(OSError):
            os.unlink(name)
