"""The interface of consistency disciplines: what a worker does instead of an optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import full_gradients
from asa.executor.model.step import Step, microbatch_rows, played
from asa.ir.consistency import Discipline
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.means import mean
from asa.sharding.split.local_parts import local
from asa.zoo.data import ImageSet


class Conduct(ABC):
    """One worker's part of a discipline: ``model``, and the ``optimizer`` of its parameters.

    A worker is a rank of plain data parallelism whose gradients are not reduced, or a group of ranks that reduce
    gradients by the group's plan. For a group, this is the part of one of its ranks, which exchanges data with the
    corresponding ranks of other groups.
    """

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer) -> None:
        self.discipline, self.model, self.optimizer = discipline, model, optimizer

    @abstractmethod
    def begin(self) -> None:
        """Start from the model's weights and the optimizer's state, which are equal on all workers (collective)."""

    changes = ""
    """Sentence on what the discipline changes about the optimizer; empty if nothing."""
    averages_statistics = "at the end of every epoch"
    """When running statistics are averaged over workers."""
    takes_part = True
    """Whether this worker computes the next step; :meth:`step` is called in any case."""
    recorded_steps = 1
    """Number of steps that are recorded to know a step's memory."""
    has_own_samples = False
    """Whether this worker takes samples other than its rows of the global batch."""

    def notes(self) -> list[str]:
        """Sentences on what the discipline changes about the optimizer and about running statistics."""
        said = [self.changes] if self.changes else []
        modules = (m for c in self.model.components for m in c.modules())
        norms = sum(isinstance(m, _NormBase) and m.running_mean is not None for m in modules)
        if norms and self.discipline.waiting != "bulk" and self.axis.size > 1:
            said.append(
                f"{self.discipline.name}: every worker normalises its own batches; the running statistics of {norms} "
                f"modules such as BatchNorm are averaged over workers {self.averages_statistics}"
            )
        return said

    def own_samples(self, images: ImageSet, indices: Tensor, step: int) -> Tensor:
        """``indices`` (int64 [rows], of the global batch) with this worker's own samples in its rows. If workers are
        groups, only the group's rows."""
        del images, step
        return self.share(indices)

    def share(self, indices: Tensor) -> Tensor:
        """The rows of ``indices`` [rows] that this worker's ranks divide among them."""
        grouped = self.model.grouped
        return indices if grouped is None else indices[grouped.rows(len(indices))]

    def played(self, *args: Any, **options: Any) -> Step:
        """Run :func:`asa.executor.model.step.played` without reducing gradients between workers."""
        with self.model.no_sync() if self.model.grouped is None else nullcontext():
            return played(*args, **options)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last batch by name, averaged over workers (collective)."""
        by_name = full_gradients(self.model)
        if not self.model.idle:
            average(list(by_name.values()), self.axis)
        return by_name

    @abstractmethod
    def step(self, batch: int) -> None:
        """Update after a backward over this worker's rows of a global batch of ``batch`` samples."""

    @abstractmethod
    def synchronize(self) -> None:
        """Bring all workers to the same weights, running statistics and optimizer state (collective)."""

    def enter(self) -> None:  # noqa: B027
        """Take the current weights, in a process that takes the place of a lost worker, once the others know about
        it."""

    def returned(self, rank: int) -> str:
        """A sentence about ``rank``, which has come back after it was lost."""
        return f"rank {rank} is back, and takes part again"

    def pause(self) -> None:  # noqa: B027  (most disciplines make nobody wait)
        """Announce that this worker is about to wait for all others, so that none of them waits for its updates."""

    def resume(self) -> None:  # noqa: B027
        """Resume after :meth:`pause`, once all workers have met."""

    def state(self) -> dict[str, Tensor]:
        """Further state that a resumed run of this discipline needs, by name; called after :meth:`synchronize`."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:  # noqa: B027  (most disciplines have no such state)
        """Restore the result of :meth:`state`; called after :meth:`begin`."""

    def held(self) -> list[Tensor]:
        """Tensors that this rank keeps between steps for the discipline, beside the model and its optimizer."""
        return []

    def answering_bytes(self) -> int:
        """The most bytes that other threads of this rank have held for others at once since the last call."""
        return 0

    def figures(self) -> dict[str, object]:
        """Counters since the last call, for the log (JSON); equal on all workers where that matters."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Close connections and process groups (collective)."""

    @property
    def rate(self) -> float:
        """Learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def axis(self) -> Axis:
        """Axis of the workers; if workers are groups, of the ranks that hold the same part as this one."""
        if self.model.grouped is not None:
            return self.model.grouped.axis
        layout = self.model.layouts[0]
        return self.model.axis("gradient", layout.data_group(self.model.position.place))

    _rate_before = 0.0
    """Learning rate of the step before this one."""
    _round_steps = 0
    """Number of steps of the current round."""

    def round_steps(self, step: int) -> int:
        """Number of steps of the round whose ``step``-th step (from 1) is taken now, by the learning rate of its first
        step. If the rate rises there (warm-up), it is the shortest period, as at the peak: the low rates of a warm-up
        would give the longest."""
        rising, self._rate_before = self.rate > self._rate_before, self.rate
        if step == 1:
            self._round_steps = self.discipline.period if rising else self.discipline.period_at(self.rate)
        return self._round_steps

    def rows(self, batch: int) -> int:
        """Number of this worker's samples in a global batch of ``batch``."""
        if self.model.grouped is not None:
            rows = self.model.grouped.rows(batch)
            return int(rows.stop - rows.start)
        return sum(part.kept.stop - part.kept.start for part in microbatch_rows(self.model, batch))

    def gradient_scale(self, batch: int) -> float:
        """Factor by which this worker's gradients were scaled, so that their mean over workers is the mean over
        ``batch``."""
        return self.rows(batch) * self.model.layouts[-1].data / batch

    @torch.no_grad()
    def unscale(self, batch: int) -> None:
        """Divide gradients by :meth:`gradient_scale`: they become those of the mean over this worker's own rows. Does
        nothing in a group, where gradients are not scaled."""
        if self.model.grouped is not None:
            return
        scale = self.gradient_scale(batch)
        if scale not in (0.0, 1.0):
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.div_(scale)

    def update(self, batch: int) -> None:
        """Take an optimizer step of this worker alone, on its rows of ``batch`` samples."""
        self.unscale(batch)
        self.optimizer.step()
        if self.model.grouped is not None:
            self.model.share_updates()

    def average_buffers(self) -> None:
        """Average running statistics over all workers (collective)."""
        self.model.average_buffers()
        if self.model.grouped is not None:
            floats = [b for c in self.model.components for b in c.buffers() if b.is_floating_point()]
            average_statistics(floats, self.axis)


@torch.no_grad()
def average(tensors: list[Tensor], axis: Axis, weight: float = 1.0) -> None:
    """Replace ``tensors`` by their mean over ``axis`` (collective). ``weight`` is the weight of this rank; the weights
    of all ranks sum to the number of ranks."""

    def averaged(flat: Tensor) -> Tensor:
        flat = flat.mul_(weight) if weight else flat.zero_()
        dist.all_reduce(flat, group=axis.group)
        return flat.div_(axis.size)

    _replace_flat(tensors, axis, averaged)


@torch.no_grad()
def average_statistics(tensors: list[Tensor], axis: Axis, weight: float = 1.0) -> None:
    """:func:`average` of buffers, of which what is equal on all ranks does not change (collective)."""
    group = axis.group
    if group is not None:
        _replace_flat(tensors, axis, lambda flat: mean(flat, group=group, ranks=axis.size, weight=weight))


def _replace_flat(tensors: list[Tensor], axis: Axis, averaged: Callable[[Tensor], Tensor]) -> None:
    """Replace ``tensors`` by what ``averaged`` makes of all those of one type in one vector."""
    if axis.group is None or not tensors:
        return
    tensors = [local(t.detach()) for t in tensors]
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same_dtype = [t for t in tensors if t.dtype == dtype]
        flat = averaged(torch.cat([t.reshape(-1) for t in same_dtype]))
        for tensor, part in zip(same_dtype, flat.split([t.numel() for t in same_dtype]), strict=True):
            tensor.copy_(part.view_as(tensor))


def check_plan(model: ParallelModel) -> None:
    """Check that workers can train independently under the model's plan.

    Raises:
        UsageError: components are split, staged, sharded or offloaded.
    """
    plan, discipline = model.plan, model.whole_plan.consistency
    assert discipline is not None
    needs_replicas = discipline.waiting != "pipelined" and model.grouped is None
    for c in plan.components if needs_replicas else ():
        if c.data.strategy != "replicate" or c.data.degree != plan.num_ranks or c.tensor.degree > 1 or c.offload:
            raise UsageError(
                f"{discipline.name} runs on whole replicas; the plan has {c.name} as {c.data.text}, "
                f"{c.tensor.strategy} x{c.tensor.degree}{', offloaded' if c.offload else ''}: plan with "
                f"--strategies {discipline}"
            )
    discipline.check(plan.compression, plan.precision)
