"""Averaging that a slow or lost worker does not delay (``local_sgd``, ``diloco`` and ``fedavg`` with a quorum).

The first worker holds the outer weights and their optimizer. A round of averaging ends when all remaining workers have
contributed, or when the quorum has and the grace period after that is over. Later contributions count in the next
round. Contributions are weighted by their samples, after "Decoupled DiLoCo" (2026). Without an outer optimizer
(``local_sgd``, ``fedavg``), the outer weights are the mean of the workers' weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asa.executor.consistency.channels import Exchange, head
from asa.executor.consistency.conduct import Conduct
from asa.executor.consistency.flat import FlatParameters, dequantised, quantised
from asa.executor.consistency.served import average_over_star
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.ir.consistency import Discipline

_PULL, _MEET, _LAST, _ENTER = 0.0, 1.0, 2.0, 3.0


class Meetings:
    """The outer weights [n] and the contributions to the current round. Each worker calls from a thread of its own."""

    def __init__(self, discipline: Discipline, weights: Tensor, workers: Sequence[int]) -> None:
        self.discipline, self.workers = discipline, set(workers)
        self.weights = nn.Parameter(weights)
        d = discipline
        self.optimizer = torch.optim.SGD(
            [self.weights], lr=d.outer_rate, momentum=d.outer_momentum, nesterov=d.outer_momentum > 0
        )
        self.held = self.absences = 0
        self._came: dict[int, tuple[Tensor, int]] = {}
        self._through: set[int] = set()
        self._number = 0
        self._enough_at: float | None = None
        self._changed = threading.Condition()

    def met(self, worker: int, moved: Tensor, samples: int = 1) -> Tensor:
        """Add ``moved`` [n], the change of weights of ``worker`` over ``samples`` samples. Wait for the end of the
        round, and return the outer weights."""
        with self._changed:
            number = self._number
            self._come(worker, moved, samples)
            while self._number == number:
                if not self._over():
                    self._changed.wait(timeout=self._patience())
                if self._number == number and self._over():
                    self._conclude()
            return self.weights.detach().clone()

    def last(self, worker: int, moved: Tensor, samples: int = 1) -> None:
        """Add the change ``moved`` of ``worker`` without waiting. The worker does not contribute again before
        :meth:`anew`."""
        with self._changed:
            self._come(worker, moved, samples)
            self._through.add(worker)
            self._changed.notify_all()

    def lost(self, worker: int) -> None:
        """Remove ``worker``, which will not contribute any more."""
        with self._changed:
            self.workers.discard(worker)
            self._changed.notify_all()

    def enter(self, worker: int) -> None:
        """Add ``worker``, which takes the place of a lost one."""
        with self._changed:
            self.workers.add(worker)
            self._through.discard(worker)
            self._came.pop(worker, None)

    def anew(self, live: Collection[int]) -> None:
        """Finish the current round. From here on, all remaining workers (``live``) contribute again."""
        with self._changed:
            if self._came:
                self._conclude()
            self.workers &= set(live)
            self._through = set()

    def _come(self, worker: int, moved: Tensor, samples: int) -> None:
        if worker in self._came:  # too late for the previous round: add both
            before, count = self._came[worker]
            moved, samples = moved + before, samples + count
        self._came[worker] = (moved, samples)
        self._changed.notify_all()

    def _needed(self) -> int:
        active = len(self.workers - self._through)
        return max(1, min(self.discipline.quorum or active, active))

    def _over(self) -> bool:
        if self.workers - self._through <= self._came.keys():
            return True
        if len(self._came) < self._needed():
            return False
        if self._enough_at is None:
            self._enough_at = time.monotonic()
        return time.monotonic() - self._enough_at >= self.discipline.grace_s

    def _patience(self) -> float:
        if self._enough_at is None:
            return 0.25
        return max(0.001, self._enough_at + self.discipline.grace_s - time.monotonic())

    def _conclude(self) -> None:
        came = [self._came[w] for w in sorted(self._came)]
        self.held += 1
        self.absences += len((self.workers - self._through) - self._came.keys())
        samples = sum(count for _, count in came)
        if not samples:  # nobody has trained since
            samples, came = len(came), [(moved, 1) for moved, _ in came]
        self.weights.grad = torch.stack([moved * (count / samples) for moved, count in came]).sum(dim=0)
        self.optimizer.step()
        self.weights.grad = None
        self._came, self._enough_at = {}, None
        self._number += 1
        self._changed.notify_all()


class QuorumSteps(Conduct):
    """Implements disciplines of local steps with a quorum."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer, votes: StarVotes) -> None:
        super().__init__(discipline, model, optimizer)
        self._votes = votes
        self._flat = FlatParameters(optimizer)
        self._meetings: Meetings | None = None
        self._exchange = Exchange(votes.rank, model.processes, [0])
        if votes.rank == 0:
            self._meetings = Meetings(discipline, self._flat.weights(), model.processes)
            self._exchange.serve(self._answer, self._meetings.lost)
        self._exchange.connect()
        self._outer = self._flat.weights()
        self._steps = self._samples = 0

    def begin(self) -> None:
        """Copy the weights, which are equal on all workers, as outer weights."""
        self._outer, self._steps, self._samples = self._flat.weights(), 0, 0
        if self._meetings is not None:
            with torch.no_grad():
                self._meetings.weights.copy_(self._outer)
            self._meetings.optimizer.state.clear()

    def step(self, batch: int) -> None:
        """Take an inner step, and average if the period is over."""
        self.unscale(batch)
        self.optimizer.step()
        self._steps, self._samples = self._steps + 1, self._samples + self.rows(batch)
        if self._steps >= self.discipline.period_at(self.rate):
            weights = self._ask(_MEET, self._moved())
            assert weights is not None
            self._go_on_from(weights)

    def enter(self) -> None:
        """Start from the outer weights."""
        weights = self._ask(_ENTER, None)
        assert weights is not None
        self._go_on_from(weights)

    def settle(self) -> None:
        """Average all remaining changes, and give every worker the outer weights (collective)."""
        self._ask(_LAST, self._moved())
        self._votes.gather([0.0])
        if self._meetings is not None:
            self._meetings.anew(self._votes.live)
        self._votes.gather([0.0])
        weights = self._ask(_PULL, None)
        assert weights is not None
        self._go_on_from(weights)
        average_over_star(self.model, self._votes)

    def _moved(self) -> Tensor:
        return self._outer - self._flat.weights()

    def _go_on_from(self, weights: Tensor) -> None:
        self._outer, self._steps, self._samples = weights, 0, 0
        self._flat.put(weights)

    def _ask(self, what: float, moved: Tensor | None) -> Tensor | None:
        body = moved
        if moved is not None and self.discipline.message == "int8":
            numbers, scales = quantised(moved, self._flat.sizes)
            body = torch.cat([scales.float().view(torch.uint8), numbers.view(torch.uint8)])
        ((_, weights),) = self._exchange.ask([(head(what, self._samples), body)])
        return weights

    def _answer(self, worker: int, asked: Tensor, body: Tensor | None) -> tuple[Tensor, Tensor | None]:
        meetings = self._meetings
        assert meetings is not None
        if asked[0] == _ENTER:
            meetings.enter(worker)
        if asked[0] in (_PULL, _ENTER) or body is None:
            return head(), meetings.weights.detach().clone()
        if self.discipline.message == "int8":
            scales, numbers = body.split([4 * len(self._flat.sizes), self._flat.total])
            body = dequantised(numbers.view(torch.int8), scales.clone().view(torch.float32), self._flat.sizes)
        moved = body.to(self._flat.dtype)
        if asked[0] == _LAST:
            meetings.last(worker, moved, int(asked[1]))
            return head(), None
        return head(), meetings.met(worker, moved, int(asked[1]))

    def state(self) -> dict[str, Tensor]:
        """Momentum of the outer optimizer, on the first worker."""
        if self._meetings is None:
            return {}
        momentum = self._meetings.optimizer.state.get(self._meetings.weights, {}).get("momentum_buffer")
        return {} if momentum is None else {"outer.momentum": momentum.clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue with the momentum of a saved run."""
        momentum = state.get("outer.momentum")
        if self._meetings is not None and momentum is not None and momentum.numel() == self._flat.total:
            self._meetings.optimizer.state[self._meetings.weights]["momentum_buffer"] = momentum.clone()

    def figures(self) -> dict[str, object]:
        """On the first worker, the number of rounds and of absences of workers."""
        if self._meetings is None:
            return {}
        return {"meetings": self._meetings.held, "absences": self._meetings.absences}

    def close(self) -> None:
        """Close the connection to the first worker."""
        self._exchange.close()
