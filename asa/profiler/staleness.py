"""Training on one device with delayed gradients, or with simulated workers that average at intervals.

A gradient is computed at the current weights and goes to the end of a queue. The oldest one in the queue becomes the
next update. An empty queue is plain training to the last bit; with a queue of ``delay`` entries, every gradient is
``delay`` updates old when it is applied. Separate workers are separate models, which take steps in turn. Neither needs
a cluster, and nothing is assumed about the effect of staleness.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asa.ir.plan import OptimizerName
from asa.ir.staleness import Curve, Setting, TrainingRun

Progress = Callable[[float, str], None]
Schedule = Callable[[float, float], float]
"""Function from the progress of a run (0 to 1) at the start of a step, and the progress of the step, to the learning
rate as a fraction of its peak."""
Loss = Callable[[object, Tensor], Tensor]
_PASSES = 1 << 20
"""Number of passes over the data that belong to one seed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training task. ``build(seed)`` makes the model. ``train(positions)`` has inputs and labels: position p is
    sample p % ``count`` in pass p // ``count``, and may be augmented differently in each pass. ``test`` are inputs
    [N, ...] and labels [N], all on the device. ``loss`` is the mean over a batch; ``hits`` is 1 for every row that is
    predicted correctly. ``schedule`` is that of the learning rate, whose peak is ``lr``."""

    build: Callable[[int], nn.Module]
    train: Callable[[Tensor], tuple[Tensor, Tensor]]
    count: int
    test: tuple[Tensor, Tensor]
    loss: Loss
    hits: Loss
    optimizer: OptimizerName
    lr: float
    momentum: float
    weight_decay: float
    global_batch: int
    schedule: Schedule = lambda _progress, _step: 1.0

    def optimizer_for(self, parameters: Sequence[nn.Parameter], momentum: float | None = None) -> torch.optim.Optimizer:
        """Make an optimizer over ``parameters`` at the full learning rate, with ``momentum`` instead of its own if
        given."""
        if self.optimizer == "sgd":
            chosen = self.momentum if momentum is None else momentum
            return torch.optim.SGD(parameters, lr=self.lr, momentum=chosen, weight_decay=self.weight_decay)
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Positions of global batches without end; each epoch has its own order, and each seed its own passes."""
        count, size = self.count, min(self.global_batch, self.count)
        draws = torch.Generator().manual_seed(seed)
        for number in itertools.count(seed * _PASSES):
            order = torch.randperm(count, generator=draws) + count * number
            for start in range(0, count - size + 1, size):
                yield order[start : start + size]

    def gradients(self, model: nn.Module, rows: Tensor) -> list[Tensor | None]:
        """Gradients of the mean loss of the positions ``rows``, in the order of the trained parameters."""
        inputs, labels = self.train(rows)
        for p in model.parameters():
            p.grad = None
        self.loss(model(inputs), labels).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    def judged(self, model: nn.Module) -> tuple[float, float]:
        """(loss, accuracy) on the test data."""
        model.eval()
        with torch.no_grad():
            output = model(self.test[0])
            result = float(self.loss(output, self.test[1])), float(self.hits(output, self.test[1]).mean())
        model.train()
        return result


def trained(task: Task, setting: Setting, *, seed: int, steps: int, every: int) -> tuple[TrainingRun, nn.Module]:
    """(run, model): one run of ``steps`` global batches, evaluated after every ``every`` of them, and the final
    model."""
    device = task.test[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = task.build(seed)
        is_local = setting.period > 0
        going = (_averaged if is_local else _delayed)(task, setting, model, task.batches(seed), steps)
        losses: list[float] = []
        accuracies: list[float] = []
        for step in range(1, steps + 1):
            next(going)
            if step % every:
                continue
            loss, accuracy = task.judged(model)
            if not math.isfinite(loss):
                return _run(seed, losses, accuracies, diverged=True), model
            losses.append(float(f"{loss:.6g}"))
            accuracies.append(float(f"{accuracy:.6g}"))
    return _run(seed, losses, accuracies, diverged=False), model


def _run(seed: int, losses: list[float], accuracies: list[float], *, diverged: bool) -> TrainingRun:
    return TrainingRun(seed=seed, losses=tuple(losses), accuracies=tuple(accuracies), diverged=diverged)


def _delayed(
    task: Task, setting: Setting, model: nn.Module, batches: Iterator[Tensor], steps: int
) -> Iterator[None]:  # fmt: skip
    """Train one model with delayed updates for ``steps`` global batches; yields once per global batch that was
    *applied*. A gradient keeps the learning rate of the time when it was computed. Under a lower momentum than the
    task's, rates are raised as at servers: not above their peak (decision 0140)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = task.optimizer_for(parameters, setting.momentum)
    lower = task.momentum if setting.momentum is None else setting.momentum
    raised, part = (1 - lower) / (1 - task.momentum), setting.pushed / (setting.workers * steps)
    weight = 1 / (1 + int(setting.age)) if setting.weighted else 1.0
    queue: deque[tuple[list[Tensor | None], float, float]] = deque()
    computed = applied = begun = 0
    while True:
        several = [next(batches).tensor_split(setting.workers) for _ in range(setting.pushed)]
        samples = sum(len(rows) for rows in several[0])
        for all_shares in zip(*several, strict=True):
            shares = [rows for rows in all_shares if len(rows)]
            if not shares:
                continue
            share = weight * sum(map(len, shares)) / samples
            of_peak = task.schedule(computed * part, part)
            computed += 1
            rate = task.lr * max(of_peak, min(of_peak * raised, 1.0))
            queue.append((_mean([task.gradients(model, rows) for rows in shares], list(map(len, shares))), share, rate))
            if len(queue) <= setting.delay:
                continue
            gradients, share, rate = queue.popleft()
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            for group in optimizer.param_groups:
                group["lr"] = rate * share if share != 1 else rate
            optimizer.step()
            applied += setting.pushed
            while applied // setting.workers > begun:
                begun += 1
                yield


def _mean(gradients: list[list[Tensor | None]], rows: list[int]) -> list[Tensor | None]:
    """Mean of gradients at the same weights, weighted by their numbers of rows."""
    if len(gradients) == 1:
        return gradients[0]
    found: list[Tensor | None] = []
    for parts in zip(*gradients, strict=True):  # a parameter has a gradient for all rows or for none
        given = [g * (n / sum(rows)) for g, n in zip(parts, rows, strict=True) if g is not None]
        found.append(torch.stack(given).sum(0) if given else None)
    return found


def _averaged(
    task: Task, setting: Setting, model: nn.Module, batches: Iterator[Tensor], steps: int
) -> Iterator[None]:  # fmt: skip
    """Train workers with their own models and optimizers for ``steps`` global batches. ``model`` is their mean after an
    outer optimizer step.

    Running statistics are averaged like weights. As in `asa train`, workers also average at the end of each pass over
    the data, and then their momenta, too. Between two averages ``model`` does not change.
    """
    workers = [deepcopy(model) for _ in range(setting.workers)]
    optimizers = [task.optimizer_for([p for p in w.parameters() if p.requires_grad]) for w in workers]
    mean_parameters = list(model.parameters())
    outer = torch.optim.SGD(
        mean_parameters, lr=setting.outer_rate, momentum=setting.outer_momentum, nesterov=setting.outer_momentum > 0
    )
    steps_of_pass, since = max(1, task.count // task.global_batch), 0
    for step, batch in enumerate(batches, 1):
        rate = task.lr * task.schedule((step - 1) / steps, 1 / steps)
        for worker, optimizer, rows in zip(workers, optimizers, batch.tensor_split(setting.workers), strict=True):
            if len(rows):
                task.gradients(worker, rows)
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
        since += 1
        is_end = step % steps_of_pass == 0
        if since == setting.period or is_end:
            _meet(model, workers, outer)
            since = 0
        if is_end:
            share_momenta(optimizers)
        yield


@torch.no_grad()
def share_momenta(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give every worker the mean of all workers' momenta."""
    for parameters in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
        states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
        moments = [k for k, v in states[0].items() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
        for key in moments if all(states) else ():
            mean = torch.stack([s[key] for s in states]).mean(0)
            for s in states:
                s[key].copy_(mean)


def _meet(model: nn.Module, workers: Sequence[nn.Module], outer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for p, *replicas in zip(model.parameters(), *(w.parameters() for w in workers), strict=True):
            p.grad = torch.sub(p, torch.stack(replicas).mean(0))
        outer.step()
        for b, *others in zip(model.buffers(), *(w.buffers() for w in workers), strict=True):
            b.copy_(torch.stack(others).mean(0) if b.is_floating_point() else others[0])
        for w in workers:
            for parameter, copy in zip(model.parameters(), w.parameters(), strict=True):
                copy.copy_(parameter)
            for buffer, other in zip(model.buffers(), w.buffers(), strict=True):
                other.copy_(buffer)


def measured(
    task: Task, settings: Sequence[Setting], *, seeds: int, steps: int, every: int, time_limit_s: float,
    progress: Progress | None = None,
) -> tuple[tuple[Curve, ...], tuple[str, ...]]:  # fmt: skip
    """(curves, skipped): curves of ``settings`` over seeds 0 to ``seeds - 1``, and a description of the runs for which
    there was no time.

    All settings run with one seed before any runs with the next. The first run is made even beyond the time limit.
    """
    began, runs_of, skipped = time.perf_counter(), {s: [] for s in settings}, []  # type: float, dict[Setting, list[TrainingRun]], list[str]
    longest = 0.0
    for seed in range(seeds):
        for i, setting in enumerate(settings):
            now = time.perf_counter()
            if (seed or i) and now - began + longest > time_limit_s:
                missing = sum(seeds - len(runs) for runs in runs_of.values())
                skipped.append(f"{missing} of {seeds * len(settings)} runs: no time left")
                break
            if progress is not None:
                progress((seed * len(settings) + i) / (seeds * len(settings)), f"seed {seed}, {setting.words}")
            runs_of[setting].append(trained(task, setting, seed=seed, steps=steps, every=every)[0])
            longest = max(longest, time.perf_counter() - now)
        if skipped:
            break
    return tuple(Curve(setting=s, runs=tuple(runs)) for s, runs in runs_of.items() if runs), tuple(skipped)
