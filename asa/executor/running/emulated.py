"""Step times of plans on emulated devices, run one after the other on the same ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asa.executor.measuring.benchmark import barrier, slowest
from asa.executor.measuring.emulation import EmulatedDevice, Emulation
from asa.executor.model.groups import Groups, groups_of
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.observing.random_inputs import random_inputs
from asa.executor.running.loop import TrainingExecutor
from asa.executor.training.precision import LossScale
from asa.executor.training.worker import LossCounter, Worker
from asa.instruments.nvml import Meter
from asa.interfaces.strategy import Strategies
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.launch import run_ranks, tell
from asa.tracing import TracedModel
from asa.tracing.preserve import with_tensors


@dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """Length of the measurement of a plan: after ``warm_up`` steps, as many steps as fit into ``budget_s`` seconds,
    between ``least_steps`` and ``most_steps``."""

    budget_s: float = 5.0
    least_steps: int = 2
    most_steps: int = 10
    warm_up: int = 2
    timeout_s: float = 300.0
    limit_s: float | None = None


def borrowed(traced: TracedModel) -> TracedModel:
    """Copy of a model that shares its weights, so that the copy can be split without changing the original. Neither may
    be trained."""
    tensors = [t for c in traced.components for t in (*c.parameters(), *c.buffers())]
    return with_tensors(traced, tensors, torch.Tensor.detach)


def emulated_worker(
    plan: Plan, traced: TracedModel, device: EmulatedDevice, strategies: Strategies, rank: int, votes: Votes,
    timeout_s: float,
) -> Worker:  # fmt: skip
    """The part of ``plan`` that ``rank`` runs, on an emulated device (collective)."""
    host = torch.device("cpu")
    emulation = Emulation(device, strategies, plan)
    model = materialize(
        plan, traced, torch.empty(0), rank=rank, strategies=strategies, device=host,
        timeout_s=timeout_s, alike=True, **emulation.hooks(),
    )  # fmt: skip
    model.train()
    return Worker(
        model=model, optimizer=emulation.optimizer_of(model), scale=LossScale("fp32"), votes=votes, precision="fp32",
        seed=0,
    )  # fmt: skip


def _rank(
    rank: int, plans: Sequence[Plan], traced: TracedModel, device: EmulatedDevice, strategies: Strategies,
    options: EmulationOptions,
) -> list[list[float]]:  # fmt: skip
    votes = Votes(options.timeout_s)
    times = []
    for number, plan in enumerate(plans):
        times.append(_steps(plan, traced, device, strategies, rank, votes, options))
        gc.collect()
        if rank == 0:
            tell((number, times[-1]))
    return times


def _steps(
    plan: Plan, traced: TracedModel, device: EmulatedDevice, strategies: Strategies, rank: int, votes: Votes,
    options: EmulationOptions,
) -> list[float]:  # fmt: skip
    worker = None
    if rank < plan.num_ranks:
        worker = emulated_worker(
            plan, borrowed(traced), device, strategies, rank, votes, options.timeout_s
        )  # fmt: skip
        images, indices = random_inputs(plan, worker.model.device), torch.arange(plan.global_batch)
        counter = LossCounter(worker.model.device)
    elif plan.num_ranks > 1:
        Groups(rank, groups_of(plan))
    times: list[float] = []
    steps = options.warm_up
    while len(times) < steps:
        barrier(votes)
        step_times = [(0.0, 0.0)]
        if worker is not None:
            worker.train(images, indices, epoch=0, step=len(times), counter=counter)
            step_times = [(t.data, t.work) for t in worker.clock.collect()]
        times.append(slowest(votes, step_times)[0][1])
        if len(times) == options.warm_up:
            fit = int(options.budget_s / max(times[-1], 1e-6))
            steps += max(options.least_steps, min(options.most_steps, fit))
    if worker is not None:
        worker.model.close()
    return times[options.warm_up :]


def measure_emulated(
    plans: Sequence[Plan],
    traced: TracedModel,
    device: EmulatedDevice,
    strategies: Strategies,
    options: EmulationOptions,
    *,
    on_plan: Callable[[int, list[float]], None] | None = None,
) -> list[Stat]:
    """Step times of the slowest rank under each of ``plans`` (of one model), on devices like ``device`` and with the
    real links between the ranks. ``on_plan`` is called after each plan.

    Raises:
        WorkersFailedError: a rank died.
    """

    def forward(_rank: int, message: tuple[int, list[float]]) -> None:
        if on_plan is not None:
            on_plan(*message)

    ranks = max(p.num_ranks for p in plans)
    results = run_ranks(
        ranks, _rank, list(plans), traced, device, strategies, options, threads=1, timeout_s=options.timeout_s,
        limit_s=options.limit_s, on_message=forward,
    )  # fmt: skip
    return [Stat.of(times) for times in results[0]]


class EmulatedExecutor(TrainingExecutor):
    """Executor with emulated devices. Epochs take their time, and nothing is validated or saved. ``emulation`` returns
    that of the model that was built last."""

    def __init__(self, *args: Any, emulation: Callable[[], Emulation], **settings: Any) -> None:
        self._emulation = emulation
        super().__init__(*args, **settings)

    def _worker_of(self, model: ParallelModel, scale: LossScale) -> Worker:
        worker = super()._worker_of(model, LossScale("fp32"))
        worker.optimizer = self._emulation().optimizer_of(model)
        return worker

    def _validate(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _peak_memory(self) -> tuple[int, ...] | None:
        return None  # activations are all one block of zeros

    def _use_of_devices(self, energy: Meter, busy_cores: float) -> tuple[float | None, float | None]:
        return None, None  # this machine's, which are not the emulated ones

    def save(self, epoch: int) -> None:
        """Do nothing: nothing was trained."""

    def _save(self) -> Path:
        return Path(self._settings.out)
