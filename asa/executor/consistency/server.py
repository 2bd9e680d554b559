"""A parameter server: one slice of the weights with its optimizer, and the rule for when workers may continue.

After Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server". This file does not know how
messages are sent. Each worker's pushes come from a thread of its own.

- A *push* is the gradient of the mean over a worker's samples. It waits in a queue until weights are requested. Then
  all pushes in the queue become one update, in the order of workers. So if every worker waits for all others, each step
  has one update with the mean over the whole batch, exactly as in synchronous training.
- The learning rate of an update is scaled by its number of samples over the global batch (times ``1 / (1 + age)`` if
  staleness is bounded). So a rate means the same for any number of pushes.
- If workers do not wait for all others, SGD's momentum is lower (:meth:`Discipline.momentum_at`). A late gradient acts
  like momentum, and both together are too much for most rates. The rate is raised in turn, so that a gradient has the
  same total effect on the weights, ``rate / (1 - momentum)``, but not above the peak of its schedule (:class:`Raise`).
- The *age* of a push is the number of whole global batches of other workers' gradients that were applied since its
  worker pulled. With a window of s, a worker must wait while any gradient in flight is s global batches old. Workers
  that continued before may each push once more, together less than a global batch, so no age exceeds s. (Ho et al. 2013
  count steps of workers instead. That slows all workers down to a permanently slow one, and lets ages reach 2 s.)
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asa.ir.consistency import Discipline

_SILENT_STEPS, _SILENT_S = 10.0, 2.0
"""Time for which a worker may be silent before others stop waiting for it: this many of its own usual steps, plus
seconds."""


class Snapshots(Protocol):
    """Storage of a server's state for the process that takes its place."""

    def due(self, step: int) -> bool:
        """Whether the next snapshot is due after ``step``."""

    def write(self, step: int, rows: dict[str, Tensor], step_s: float) -> None:
        """Store ``rows`` as the state after ``step`` (counted from 1). A step takes ``step_s`` seconds."""

    def read(self) -> dict[str, Tensor] | None:
        """The newest state; None if there is none."""


@dataclass
class Counts:
    """Counters of a server.

    Attributes:
        ages: number of applied pushes by age.
        applied, rejected: samples.
        waited_s: seconds for which workers waited because of the window.
        lost_samples: samples whose gradients were applied and are lost, because this server was started again from a
            snapshot.
    """

    lost_samples: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    applied: int = 0
    rejected: int = 0
    updates: int = 0
    most_ahead: int = 0
    waited_s: float = 0.0


@dataclass
class _Push:
    worker: int
    gradient: Tensor
    samples: int
    rates: tuple[float, ...]
    clock: int
    batch: int


@dataclass
class _Member:
    """A server's record of one worker.

    Attributes:
        clock: number of pushes so far.
        seen_samples: number of other workers' samples that were applied when it last pulled.
        last_serial: number of its last push.
        finished: whether it pushes no more until the clocks are reset.
    """

    clock: int = 0
    applied: int = 0
    seen_samples: int = 0
    last_message_at: float = field(default_factory=time.monotonic)
    usual_s: float = 0.0
    silent: bool = False
    waiting: bool = False
    finished: bool = False
    computing: bool = True
    last_serial: int = 0


class Server:
    """A server for the weights ``flat`` [n], which begin at element ``start`` of the whole vector.

    ``groups`` are (begin, end) of each parameter group of ``optimizer`` in that vector. The server's own optimizer has
    the same class and options. ``workers`` are the ranks that push and pull.
    """

    def __init__(
        self, discipline: Discipline, flat: Tensor, start: int, groups: Sequence[tuple[int, int]], optimizer: Optimizer,
        workers: Sequence[int], batch: int,
    ) -> None:  # fmt: skip
        self.discipline, self.flat, self.start, self.batch = discipline, flat, start, batch
        self.optimizer, self.parts = _optimizer_like(optimizer, flat, start, groups)
        self._raises = [lower_momentum(group, discipline, len(workers)) for group in self.optimizer.param_groups]
        self.members = {w: _Member() for w in workers}
        self.counts = Counts()
        self._queue: list[_Push] = []
        self._total = 0
        self._changed = threading.Condition()
        self._snapshots: Snapshots | None = None
        self._restarts = self._applied_before = self._lost_before = 0
        self._updated = time.monotonic()
        self._usual_s = 0.0
        self._window = 0 if discipline.waiting == "bulk" else discipline.window
        self._by_age = discipline.waiting == "stale"

    def push(
        self, worker: int, gradient: Tensor, samples: int, rates: Sequence[float], *, batch: int | None = None,
        serial: int = 0,
    ) -> Tensor:  # fmt: skip
        """Accept a push, wait until ``worker`` may continue, and return a copy [n] of the weights at that time.

        ``batch`` is the number of samples for which an update has the full learning rate. None stands for the global
        batch; the last, short step of workers that take all steps together has fewer. ``serial`` is the number of the
        push, or 0. It shows that a push was sent again after a restart of this server.
        """
        with self._changed:
            self._record_message(worker)
            member = self.members[worker]
            member.finished = False
            if not serial or serial != member.last_serial:
                member.last_serial = serial
                member.clock += 1
                member.computing = False
                self._queue.append(_Push(worker, gradient, samples, tuple(rates), member.clock, batch or self.batch))
                if self._window != 0:
                    self._apply()
                self._changed.notify_all()
            self._wait_for(worker, member)
            return self._weights_for(member)

    def pull(self, worker: int) -> Tensor:
        """Copy [n] of the current weights."""
        with self._changed:
            self._record_message(worker)
            self.members[worker].finished = False
            return self._weights_for(self.members[worker])

    def finish(self, worker: int) -> None:
        """Record that ``worker`` pushes no more until :meth:`reset_clocks` resets the clocks."""
        with self._changed:
            if worker in self.members:
                self.members[worker].finished = True
            self._changed.notify_all()

    def pause(self, worker: int) -> None:
        """Record that ``worker`` computes nothing until it pulls again."""
        with self._changed:
            if worker in self.members:
                self.members[worker].computing = False
            self._changed.notify_all()

    def remove(self, worker: int) -> None:
        """Remove ``worker``: nobody waits for it any more."""
        with self._changed:
            self.members.pop(worker, None)
            self._changed.notify_all()

    def held(self) -> list[Tensor]:
        """The weights and the optimizer's state."""
        states = self.optimizer.state.values()
        return [self.flat, *(v for s in states for v in s.values() if isinstance(v, Tensor))]

    def keep_snapshots(self, snapshots: Snapshots) -> None:
        """Write a snapshot now, and from now on whenever one is due."""
        with self._changed:
            self._snapshots = snapshots
            self._snapshot()

    def _snapshot(self) -> None:
        """Write weights, optimizer state and the records of all workers."""
        assert self._snapshots is not None
        rows = {"weights": self.flat}
        for i, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                rows |= {f"{i}.{k}": v for k, v in self.optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
        records = [[w, m.last_serial, m.applied] for w, m in self.members.items()]
        rows["members"] = torch.tensor(records, dtype=torch.int64).reshape(-1, 3)
        counts = self.counts
        rows["counts"] = torch.tensor(
            [self._total, counts.applied, counts.rejected, counts.updates, counts.most_ahead, counts.lost_samples,
             self._restarts]
        )  # fmt: skip
        rows["ages"] = torch.tensor(list(counts.ages.items()), dtype=torch.int64).reshape(-1, 2)
        self._snapshots.write(counts.updates + 1, rows, self._usual_s)

    @torch.no_grad()
    def restore(self, rows: dict[str, Tensor]) -> None:
        """Continue from the snapshot ``rows`` of the process before this one. The next push of each worker counts as if
        the worker had just pulled, because it is unknown which of the lost updates it has seen."""
        with self._changed:
            c = self.counts
            self.flat.copy_(rows["weights"])
            numbers = rows["counts"].tolist()
            self._total, c.applied, c.rejected, c.updates, c.most_ahead, c.lost_samples, restarts = numbers
            self._applied_before, self._lost_before, self._restarts = c.applied, c.lost_samples, restarts + 1
            c.ages = Counter(dict(rows["ages"].tolist()))
            for worker, serial, applied in rows["members"].tolist():
                self.members[worker] = _Member(last_serial=serial, applied=applied, seen_samples=self._total - applied)
            for name, row in rows.items():
                if name in ("weights", "counts", "ages", "members"):
                    continue
                group, _, key = name.partition(".")
                for p in self.optimizer.param_groups[int(group)]["params"]:
                    self.optimizer.state[p][key] = row

    @torch.no_grad()
    def restart(self, weights: Tensor) -> None:
        """Replace the weights by ``weights`` [n], and clear queue and optimizer state."""
        with self._changed:
            self._queue = []
            self.flat.copy_(weights)
            self.optimizer.state.clear()

    def set_state(self, group: int, key: str, row: Tensor | None, scalar: float) -> None:
        """Set a part of the optimizer's state: ``row``, this server's part of a group, or the number ``scalar``."""
        with self._changed:
            for p in self.optimizer.param_groups[group]["params"]:
                value = torch.tensor(scalar, dtype=torch.float32) if row is None else row.clone()
                self.optimizer.state[p][key] = value

    def state_description(self) -> list[dict[str, float | None]]:
        """Optimizer state by group and key: a number, or None for a row."""
        with self._changed:
            self._apply()
            entries: list[dict[str, float | None]] = []
            for group in self.optimizer.param_groups:
                state = self.optimizer.state.get(group["params"][0], {}) if group["params"] else {}
                rows = {k: v for k, v in state.items() if isinstance(v, Tensor)}
                entries.append({k: None if v.dim() else float(v) for k, v in sorted(rows.items())})
            return entries

    def state_row(self, group: int, key: str) -> Tensor:
        """Copy of a row of the optimizer's state; empty if this server has no part of the group."""
        with self._changed:
            parameters = self.optimizer.param_groups[group]["params"]
            return self.optimizer.state[parameters[0]][key].clone() if parameters else self.flat.new_empty(0)

    def counters(self) -> dict[str, object]:
        """Counters so far, for a log."""
        with self._changed:
            c = self.counts
            ages = {str(age): c.ages[age] for age in sorted(c.ages)}
            return {
                "samples_applied": c.applied, "samples_rejected": c.rejected, "updates": c.updates, "ages": ages,
                "most_steps_ahead": c.most_ahead, "waited_s": c.waited_s,
                **({"samples_gone": c.lost_samples} if self._restarts else {}),
            }  # fmt: skip

    @property
    def age(self) -> tuple[int, int]:
        """(samples, restarts): number of samples whose gradients were applied, and how often this server was started
        again."""
        return self.counts.applied, self._restarts

    def count_lost_samples(self, applied: int, restarts: int) -> None:
        """Compare with :attr:`age` as a worker has last seen it, and record the samples that are lost: those applied
        between the snapshot and a restart."""
        with self._changed:
            if restarts < self._restarts:
                self.counts.lost_samples = max(
                    self.counts.lost_samples, self._lost_before + applied - self._applied_before
                )

    def reset_clocks(self, live: Collection[int]) -> None:
        """Reset the clocks of all remaining workers (``live``), which have synchronized."""
        with self._changed:
            self._apply()
            self.members = {w: m for w, m in self.members.items() if w in live}
            for member in self.members.values():
                member.clock, member.silent, member.finished, member.last_message_at = 0, False, False, time.monotonic()
                member.computing, member.seen_samples = True, self._total - member.applied

    def _record_message(self, worker: int) -> None:
        """Record a message of ``worker``. A worker that had been given up as silent continues at the clock of the
        slowest other worker."""
        member, now = self.members.get(worker), time.monotonic()
        if member is None:  # it takes the place of a lost one
            clock = min((m.clock for m in self._active_others(worker)), default=0)
            member = self.members[worker] = _Member(clock=clock, seen_samples=self._total)
        if member.silent:
            member.silent = False
            member.clock = max(member.clock, min((m.clock for m in self._active_others(worker)), default=0))
        else:
            usual_s, elapsed_s = member.usual_s, now - member.last_message_at
            member.usual_s = 0.8 * usual_s + 0.2 * min(elapsed_s, 10 * usual_s) if usual_s else elapsed_s
        member.last_message_at = now

    def _active_others(self, worker: int) -> list[_Member]:
        return [m for w, m in self.members.items() if w != worker and not m.silent and not m.finished]

    def _wait_for(self, worker: int, member: _Member) -> None:
        """Wait until ``worker`` may continue, or another process has taken its place."""
        if self._window is None:
            return
        began = time.monotonic()
        member.waiting = True
        while self.members.get(worker) is member:
            ahead = member.clock - min((m.clock for m in self._active_others(worker)), default=member.clock)
            if self._may_continue(worker, ahead):
                self.counts.most_ahead = max(self.counts.most_ahead, ahead)
                break
            if not self._changed.wait(timeout=0.25) and not self.discipline.lockstep:
                self._give_up_silent()
        member.waiting = False
        member.last_message_at = time.monotonic()
        self.counts.waited_s += member.last_message_at - began

    def _may_continue(self, worker: int, ahead: int) -> bool:
        """Whether no gradient in flight gets too old; with a window of 0, whether no worker is a step behind."""
        if self._window == 0:
            return ahead <= 0
        assert self._window is not None
        computing_members = [m for m in self._active_others(worker) if m.computing]
        return all(self._total - m.applied - m.seen_samples < self._window * self.batch for m in computing_members)

    def _give_up_silent(self) -> None:
        """Stop waiting for workers that have been silent for far longer than their steps usually take."""
        now = time.monotonic()
        for member in self.members.values():
            patience = _SILENT_STEPS * member.usual_s + _SILENT_S
            if not member.waiting and now - member.last_message_at > patience:
                member.silent = True

    def _weights_for(self, member: _Member) -> Tensor:
        self._apply()
        member.seen_samples = self._total - member.applied
        member.computing = True
        member.last_message_at = time.monotonic()
        return self.flat.clone()

    @torch.no_grad()
    def _apply(self) -> None:
        """Apply all queued pushes as one update."""
        # With a window of 0, hold pushes of a worker that is a step ahead until all others have reached that step.
        due = min((m.clock for m in self.members.values() if not m.silent), default=0) if self._window == 0 else None
        queue = sorted((p for p in self._queue if due is None or p.clock <= due), key=lambda p: p.worker)
        self._queue = [] if due is None else [p for p in self._queue if p.clock > due]
        accepted: list[tuple[_Push, float]] = []
        for push in queue:
            member = self.members.get(push.worker, _Member())
            age = (self._total - member.applied - member.seen_samples) // self.batch
            if self.discipline.max_age is not None and age > self.discipline.max_age:
                self.counts.rejected += push.samples
                continue
            self.counts.ages[age] += 1
            accepted.append((push, push.samples / (1 + age) if self._by_age else float(push.samples)))
        if not accepted:
            return
        total_weight = sum(weight for _, weight in accepted)
        gradient = accepted[0][0].gradient
        if len(accepted) > 1:
            gradient.mul_(accepted[0][1] / total_weight)
        for push, weight in accepted[1:]:
            gradient.add_(push.gradient, alpha=weight / total_weight)
        for push, _ in accepted:
            self._total += push.samples
            self.counts.applied += push.samples
            if push.worker in self.members:
                self.members[push.worker].applied += push.samples
        self._update(gradient, total_weight / accepted[-1][0].batch, accepted[-1][0].rates)

    def _update(self, gradient: Tensor, share: float, rates: tuple[float, ...]) -> None:
        self.counts.updates += 1
        groups = zip(self.optimizer.param_groups, rates, self._raises, self.parts, strict=True)
        for group, rate, raised, (begin, end) in groups:
            group["lr"] = raised.of(rate) * share
            if begin < end:
                group["params"][0].grad = gradient[begin:end]
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        elapsed_s, self._updated = time.monotonic() - self._updated, time.monotonic()
        self._usual_s = (
            elapsed_s if not self._usual_s else 0.9 * self._usual_s + 0.1 * min(elapsed_s, 10 * self._usual_s)
        )
        if self._snapshots is not None and self._snapshots.due(self.counts.updates + 1):
            self._snapshot()


@dataclass(frozen=True)
class Raise:
    """How a learning rate is raised to make up for a lower momentum: by ``factor``, but not above ``most``, the peak of
    its schedule.

    Late gradients are stable only up to a lower rate than those of plain SGD with momentum
    (:func:`asa.ir.consistency.bearable_one_late`). So the end of a schedule is raised, and its peak is not (decision
    0140).
    """

    factor: float
    most: float

    def of(self, rate: float) -> float:
        """The raised ``rate``; never below it."""
        return max(rate, min(rate * self.factor, self.most))


def lower_momentum(group: dict[str, Any], discipline: Discipline, workers: int) -> Raise:
    """Lower the momentum of an SGD group as ``discipline`` asks; returns how its rates are raised in turn."""
    momentum = group.get("momentum", 0.0)
    if not momentum:
        return Raise(1.0, 0.0)
    group["momentum"] = discipline.momentum_at(momentum, workers)
    peak = max(float(group.get(name) or 0.0) for name in ("lr", "initial_lr", "max_lr"))
    return Raise((1 - group["momentum"]) / (1 - momentum), peak)


def momentum_changes(discipline: Discipline, optimizer: Optimizer, workers: int) -> str:
    """Sentence on how ``discipline`` lowers the momentum of ``optimizer``; empty if it does not."""
    for group in optimizer.param_groups:
        momentum = group.get("momentum", 0.0)
        lower = discipline.momentum_at(momentum, workers) if momentum else momentum
        if lower != momentum:
            return (
                f"{discipline.name} updates with momentum {lower:.3g} in place of {momentum:.3g}, because late "
                "gradients act like momentum; rates are raised in turn, but not above the peak of their schedule"
            )
    return ""


def _optimizer_like(
    optimizer: Optimizer, flat: Tensor, start: int, groups: Sequence[tuple[int, int]]
) -> tuple[Optimizer, list[tuple[int, int]]]:
    """An optimizer of the same class and options over views of ``flat``, and start and stop of each group in
    ``flat``."""
    parts = []
    new = copy.copy(optimizer)
    new.state = defaultdict(dict)
    new.param_groups = []
    for group, (a, b) in zip(optimizer.param_groups, groups, strict=True):
        begin, end = (min(max(x - start, 0), flat.numel()) for x in (a, b))
        parts.append((begin, end))
        new.param_groups.append({**group, "params": [nn.Parameter(flat[begin:end])] if begin < end else []})
    return new, parts
