"""A pipeline that is not drained between batches (``pipedream``), whose gradients are one update old.

After Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", in the form of Narayanan et
al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW): microbatches of the next batch enter while
those of the last one come back (1F1B without a flush). All stages compute a batch at weights of one version (vertical
sync), and go back at the weights they went forward at (weight stashing): batch t at those that batch t - 2 left. That
is a delay of one update whatever the number of stages. A single stage waits for nobody and trains as ever.

The pipeline is drained where training is to be in one state: for a checkpoint, and where an epoch ends.
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
    """A batch under way: the ``version`` of weights it computes with, the ``rates`` of its update, and how many of its
    microbatches have not come back."""

    step: Step
    version: int
    rates: list[float]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.step.rows)


class UndrainedPipeline(Conduct):
    """The conduct of ``pipedream``."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer) -> None:
        super().__init__(discipline, model, optimizer)
        plan = model.plan
        self._stages = len(plan.stages)
        for c in plan.components:
            if c.data.degree * c.tensor.degree > 1 or c.offload or c.checkpoint:
                more = ", offloaded" if c.offload else ", recomputed" if c.checkpoint else ""
                raise UsageError(
                    f"{discipline.name} runs with one device a stage; the plan has {c.name} as {c.data.text}, "
                    f"{c.tensor.strategy} x{c.tensor.degree}{more}: plan with --strategies {discipline}"
                )
        self._behind = self._stages - 1 - model.position.stage if not model.idle else 0
        self._flying: deque[tuple[_Batch, int]] = deque()
        self._live: list[Step] = []
        self._count = 0

    def begin(self) -> None:
        """All versions are the model's weights."""
        self._places = [
            (module._parameters, name, p)
            for c in self.model.components
            for module in c.modules()
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._versions = [
            {p: nn.Parameter(p.detach().clone()) for _, _, p in self._places} if self._stages > 1 else {}
            for _ in range(_VERSIONS)
        ]
        self._flying.clear()
        self._live.clear()
        self._count = 0

    def played(
        self, model: ParallelModel, samples: Tensor, step: int, inputs: Any, labels: Any, **options: Any
    ) -> Step:
        """Send a batch in, and take back as many microbatches as the stages behind have no room for; the loss of the
        batch is known, its update is made when its last microbatch comes back."""
        if self._stages == 1:
            return super().played(model, samples, step, inputs, labels, **options)
        found = Step(
            model=model, samples=samples, step=step, inputs=inputs, labels=labels,
            rows=microbatch_rows(model, len(samples)), beside=self._live, **options,
        )  # fmt: skip
        self._live.append(found)
        batch = _Batch(found, self._count % _VERSIONS, [float(g["lr"]) for g in self.optimizer.param_groups])
        self._count += 1
        turns: list[tuple[_Batch, Action]] = []
        while self._flying and self._flying[0][0].version == batch.version:  # its weights are about to be needed
            turns.append(self._back())
        for j in range(len(found.rows)):
            turns.append((batch, Action(direction="forward", microbatch=j)))
            self._flying.append((batch, j))
            if len(self._flying) > self._behind:
                turns.append(self._back())
        self._play(turns)
        return found

    def _back(self) -> tuple[_Batch, Action]:
        batch, j = self._flying.popleft()
        return batch, Action(direction="backward", microbatch=j)

    def _play(self, turns: Sequence[tuple[_Batch, Action]]) -> None:
        """Every action in order. What the next one waits for is on its way while this one computes."""
        try:
            for i, (batch, action) in enumerate(turns):
                for other, coming in turns[i : i + 2]:
                    other.step.expect(coming)
                faults.reached(action.direction)
                self._install(self._versions[batch.version])
                if action.direction == "forward":
                    batch.step.forward(action.microbatch)
                    continue
                batch.left -= 1
                batch.step.backward(action.microbatch, last=not batch.left)
                if not batch.left:
                    self._update(batch)
        finally:
            self._install(None)

    def _install(self, version: dict[nn.Parameter, nn.Parameter] | None) -> None:
        """Have modules compute with a version of the weights; None: with the newest."""
        for parameters, name, p in self._places:
            parameters[name] = p if version is None else version[p]

    @torch.no_grad()
    def _update(self, batch: _Batch) -> None:
        """The optimizer's step with the gradients of a batch; the version that it was computed with is the newest."""
        version, groups = self._versions[batch.version], self.optimizer.param_groups
        for p, held in version.items():
            p.grad, held.grad = held.grad, None
        now = [g["lr"] for g in groups]
        for group, rate in zip(groups, batch.rates, strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for group, rate in zip(groups, now, strict=True):
            group["lr"] = rate
        for p, held in version.items():
            held.copy_(p)
        self._live.remove(batch.step)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last batch, by name; the pipeline is drained for them (collective)."""
        self._drain()
        return super().gradients()

    def step(self, batch: int) -> None:
        """An update where there is one stage; else all are made as microbatches come back."""
        del batch
        if self._stages == 1:
            self.optimizer.step()

    def settle(self) -> None:
        """Drain the pipeline (collective)."""
        self._drain()
        self.model.average_buffers()

    def close(self) -> None:
        """Drain the pipeline (collective): what is on its way is waited for."""
        self._drain()

    def _drain(self) -> None:
        if self._stages == 1:
            return
        self._play([self._back() for _ in range(len(self._flying))])
        self.model.links.settle()
        self._count = 0
        with torch.no_grad():
            for version in self._versions:
                for p, held in version.items():
                    held.copy_(p)
