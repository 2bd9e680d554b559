"""A pipeline that is not drained between batches (``pipedream``); its gradients are delayed by one update.

After Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", in the form of Narayanan et
al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW). Microbatches of the next batch enter while
those of the last one still run backward (1F1B without a flush). All stages compute a batch with one version of the
weights (vertical sync), and backward uses the weights of its forward (weight stashing). Batch t uses the weights after
batch t - 2. That is a delay of one update for any number of stages. A single stage has no delay.

The pipeline is drained where training must have one state: for a checkpoint, and at the end of an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asa.errors import UsageError
from asa.executor.consistency.conduct import Conduct
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.step import Step, microbatch_rows
from asa.interfaces.schedule import Action
from asa.ir.consistency import Discipline
from asa.launch import faults

_VERSIONS = 2


@dataclass
class _Batch:
    """A batch in flight: the ``version`` of weights that it uses, the learning ``rates`` of its update, and the number
    of microbatches whose backward is not done (``pending_backwards``)."""

    step: Step
    version: int
    rates: list[float]
    pending_backwards: int = field(init=False)

    def __post_init__(self) -> None:
        self.pending_backwards = len(self.step.rows)


class UndrainedPipeline(Conduct):
    """Implements ``pipedream``."""

    recorded_steps = 2 * _VERSIONS
    """After two steps, all batches in flight were begun in the record; after two more, it has seen them end."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer) -> None:
        super().__init__(discipline, model, optimizer)
        plan = model.plan
        self._stages = len(plan.stages)
        for c in plan.components:
            if c.data.degree * c.tensor.degree > 1 or c.offload or c.checkpoint:
                setting = ", offloaded" if c.offload else ", recomputed" if c.checkpoint else ""
                raise UsageError(
                    f"{discipline.name} runs with one device a stage; the plan has {c.name} as {c.data.text}, "
                    f"{c.tensor.strategy} x{c.tensor.degree}{setting}: plan with --strategies {discipline}"
                )
        self._later_stages = self._stages - 1 - model.position.stage if not model.idle else 0
        self._in_flight: deque[tuple[_Batch, int]] = deque()
        self._unfinished_steps: list[Step] = []
        self._count = 0

    def begin(self) -> None:
        """Copy the model's weights into all versions."""
        self._parameter_slots = [
            (module._parameters, name, p)
            for c in self.model.components
            for module in c.modules()
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._versions = [
            {p: nn.Parameter(p.detach().clone()) for _, _, p in self._parameter_slots} if self._stages > 1 else {}
            for _ in range(_VERSIONS)
        ]
        self._in_flight.clear()
        self._unfinished_steps.clear()
        self._count = 0

    def played(
        self, model: ParallelModel, samples: Tensor, step: int, inputs: Any, labels: Any, **options: Any
    ) -> Step:
        """Send a batch into the pipeline, and run as many backwards as the schedule needs to make room.

        The loss of the batch is known then. Its update is made after the backward of its last microbatch.
        """
        if self._stages == 1:
            return super().played(model, samples, step, inputs, labels, **options)
        new_step = Step(
            model=model, samples=samples, step=step, inputs=inputs, labels=labels,
            rows=microbatch_rows(model, len(samples)), unfinished=self._unfinished_steps, **options,
        )  # fmt: skip
        self._unfinished_steps.append(new_step)
        batch = _Batch(new_step, self._count % _VERSIONS, [float(g["lr"]) for g in self.optimizer.param_groups])
        self._count += 1
        actions: list[tuple[_Batch, Action]] = []
        while self._in_flight and self._in_flight[0][0].version == batch.version:  # the memory of its version is needed
            actions.append(self._next_backward())
        for j in range(len(new_step.rows)):
            actions.append((batch, Action(direction="forward", microbatch=j)))
            self._in_flight.append((batch, j))
            if len(self._in_flight) > self._later_stages:
                actions.append(self._next_backward())
        self._run_actions(actions)
        return new_step

    def _next_backward(self) -> tuple[_Batch, Action]:
        batch, j = self._in_flight.popleft()
        return batch, Action(direction="backward", microbatch=j)

    def _run_actions(self, actions: Sequence[tuple[_Batch, Action]]) -> None:
        """Run all actions in order. During one of them, the data for the next is already being received."""
        try:
            for i, (batch, action) in enumerate(actions):
                for coming_batch, coming_action in actions[i : i + 2]:
                    coming_batch.step.expect(coming_action)
                faults.reached(action.direction)
                self._install(self._versions[batch.version])
                if action.direction == "forward":
                    batch.step.forward(action.microbatch)
                    continue
                if batch.pending_backwards == len(batch.step.rows):  # gradients of the last batch make room
                    self.optimizer.zero_grad()
                batch.pending_backwards -= 1
                batch.step.backward(action.microbatch, last=not batch.pending_backwards)
                if not batch.pending_backwards:
                    self._update(batch)
        finally:
            self._install(None)

    def _install(self, version: dict[nn.Parameter, nn.Parameter] | None) -> None:
        """Make modules compute with a version of the weights; None stands for the newest."""
        for parameters, name, p in self._parameter_slots:
            parameters[name] = p if version is None else version[p]

    @torch.no_grad()
    def _update(self, batch: _Batch) -> None:
        """Take the optimizer step for a batch; the version that the batch was computed with becomes the newest."""
        version, groups = self._versions[batch.version], self.optimizer.param_groups
        for p, stashed in version.items():
            p.grad, stashed.grad = stashed.grad, None
        current_rates = [g["lr"] for g in groups]
        for group, rate in zip(groups, batch.rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for group, rate in zip(groups, current_rates, strict=True):
            group["lr"] = rate
        for p, stashed in version.items():
            stashed.copy_(p)
        self._unfinished_steps.remove(batch.step)

    def held(self) -> list[Tensor]:
        """The versions of the weights that batches in flight are computed with."""
        return [stashed for version in self._versions for stashed in version.values()]

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last batch by name; drains the pipeline (collective)."""
        self._drain()
        return super().gradients()

    def step(self, batch: int) -> None:
        """Take the optimizer step if there is one stage; otherwise updates are made as backwards finish."""
        del batch
        if self._stages == 1:
            self.optimizer.step()

    def synchronize(self) -> None:
        """Drain the pipeline (collective)."""
        self._drain()
        self.model.average_buffers()

    def close(self) -> None:
        """Drain the pipeline (collective), so that all batches in flight are finished."""
        self._drain()

    def _drain(self) -> None:
        if self._stages == 1:
            return
        self._run_actions([self._next_backward() for _ in range(len(self._in_flight))])
        self.model.links.finish_sends()
        self._count = 0
        with torch.no_grad():
            for version in self._versions:
                for p, stashed in version.items():
                    stashed.copy_(p)
