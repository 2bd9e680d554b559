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
from asa.executor.consistency.flat_parameters import FlatParameters, dequantised, quantised
from asa.executor.consistency.parameter_servers import average_over_star
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.ir.consistency import Discipline

_PULL, _AVERAGE, _LAST, _ENTER = 0.0, 1.0, 2.0, 3.0


class AveragingRounds:
    """The outer weights [n] and the contributions to the current round. Each worker calls from a thread of its own."""

    def __init__(self, discipline: Discipline, weights: Tensor, workers: Sequence[int]) -> None:
        self.discipline, self.workers = discipline, set(workers)
        self.weights = nn.Parameter(weights)
        d = discipline
        self.optimizer = torch.optim.SGD(
            [self.weights], lr=d.outer_rate, momentum=d.outer_momentum, nesterov=d.outer_momentum > 0
        )
        self.count = self.absences = 0
        self._contributions: dict[int, tuple[Tensor, int]] = {}
        self._finished: set[int] = set()
        self._number = 0
        self._quorum_at: float | None = None
        self._changed = threading.Condition()

    def contribute(self, worker: int, change: Tensor, samples: int = 1) -> Tensor:
        """Add ``change`` [n], the change of weights of ``worker`` over ``samples`` samples. Wait for the end of the
        round, and return the outer weights."""
        with self._changed:
            number = self._number
            self._add(worker, change, samples)
            while self._number == number:
                if not self._is_over():
                    self._changed.wait(timeout=self._patience())
                if self._number == number and self._is_over():
                    self._end_round()
            return self.weights.detach().clone()

    def contribute_last(self, worker: int, change: Tensor, samples: int = 1) -> None:
        """Add the change ``change`` of ``worker`` without waiting. The worker does not contribute again before
        :meth:`restart`."""
        with self._changed:
            self._add(worker, change, samples)
            self._finished.add(worker)
            self._changed.notify_all()

    def remove(self, worker: int) -> None:
        """Remove ``worker``, which will not contribute any more."""
        with self._changed:
            self.workers.discard(worker)
            self._changed.notify_all()

    def add(self, worker: int) -> None:
        """Add ``worker``, which takes the place of a lost one."""
        with self._changed:
            self.workers.add(worker)
            self._finished.discard(worker)
            self._contributions.pop(worker, None)

    def restart(self, live: Collection[int]) -> None:
        """Finish the current round. From here on, all remaining workers (``live``) contribute again."""
        with self._changed:
            if self._contributions:
                self._end_round()
            self.workers &= set(live)
            self._finished = set()

    def _add(self, worker: int, change: Tensor, samples: int) -> None:
        if worker in self._contributions:  # too late for the previous round: add both
            earlier, count = self._contributions[worker]
            change, samples = change + earlier, samples + count
        self._contributions[worker] = (change, samples)
        self._changed.notify_all()

    def _needed(self) -> int:
        active = len(self.workers - self._finished)
        return max(1, min(self.discipline.quorum or active, active))

    def _is_over(self) -> bool:
        if self.workers - self._finished <= self._contributions.keys():
            return True
        if len(self._contributions) < self._needed():
            return False
        if self._quorum_at is None:
            self._quorum_at = time.monotonic()
        return time.monotonic() - self._quorum_at >= self.discipline.grace_s

    def _patience(self) -> float:
        if self._quorum_at is None:
            return 0.25
        return max(0.001, self._quorum_at + self.discipline.grace_s - time.monotonic())

    def _end_round(self) -> None:
        contributions = [self._contributions[w] for w in sorted(self._contributions)]
        self.count += 1
        self.absences += len((self.workers - self._finished) - self._contributions.keys())
        samples = sum(count for _, count in contributions)
        if samples:  # else nobody has trained since, and an outer step would go on by its momentum alone
            self.weights.grad = torch.zeros_like(self.weights)
            for change, count in contributions:
                self.weights.grad.add_(change, alpha=count / samples)
            self.optimizer.step()
            self.weights.grad = None
        self._contributions, self._quorum_at = {}, None
        self._number += 1
        self._changed.notify_all()


class QuorumSteps(Conduct):
    """Implements disciplines of local steps with a quorum."""

    def __init__(self, discipline: Discipline, model: ParallelModel, optimizer: Optimizer, votes: StarVotes) -> None:
        super().__init__(discipline, model, optimizer)
        self._votes = votes
        self._flat = FlatParameters(optimizer)
        self._rounds: AveragingRounds | None = None
        self._exchange = Exchange(votes.rank, model.processes, [0])
        if votes.rank == 0:
            self._rounds = AveragingRounds(discipline, self._flat.weights(), model.processes)
            self._exchange.serve(self._answer, self._rounds.remove)
        self._exchange.connect()
        self._outer = self._flat.weights()
        self._steps = self._samples = 0

    def begin(self) -> None:
        """Copy the weights, which are equal on all workers, as outer weights."""
        self._outer, self._steps, self._samples = self._flat.weights(), 0, 0
        if self._rounds is not None:
            with torch.no_grad():
                self._rounds.weights.copy_(self._outer)
            self._rounds.optimizer.state.clear()

    def step(self, batch: int) -> None:
        """Take an inner step, and average if the period is over."""
        self._flat.check_trained(self.discipline)
        self.unscale(batch)
        self.optimizer.step()
        self._steps, self._samples = self._steps + 1, self._samples + self.rows(batch)
        if self._steps >= self.round_steps(self._steps):
            self._continue_from(_AVERAGE, self._change())

    def enter(self) -> None:
        """Start from the outer weights."""
        self._continue_from(_ENTER)

    def synchronize(self) -> None:
        """Average all remaining changes, and give every worker the outer weights (collective)."""
        self._ask(_LAST, self._change())
        self._votes.gather([0.0])
        if self._rounds is not None:
            self._rounds.restart(self._votes.live)
        self._votes.gather([0.0])
        self._continue_from(_PULL)
        average_over_star(self.model, self._votes)

    def _change(self) -> Tensor:
        return self._outer - self._flat.weights()

    def _continue_from(self, operation: float, change: Tensor | None = None) -> None:
        weights = self._ask(operation, change)
        assert weights is not None
        self._outer, self._steps, self._samples = weights, 0, 0
        self._flat.put(weights)

    def _ask(self, operation: float, change: Tensor | None) -> Tensor | None:
        body = change
        if change is not None and self.discipline.message == "int8":
            numbers, scales = quantised(change, self._flat.sizes)
            body = torch.cat([scales.float().view(torch.uint8), numbers.view(torch.uint8)])
        ((_, weights),) = self._exchange.ask([(head(operation, self._samples), body)])
        return weights

    def _answer(self, worker: int, header: Tensor, body: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rounds = self._rounds
        assert rounds is not None
        if header[0] == _ENTER:
            rounds.add(worker)
        if header[0] in (_PULL, _ENTER) or body is None:
            return head(), rounds.weights.detach().clone()
        if self.discipline.message == "int8":
            scales, numbers = body.split([4 * len(self._flat.sizes), self._flat.total])
            body = dequantised(numbers.view(torch.int8), scales.clone().view(torch.float32), self._flat.sizes)
        change = body.to(self._flat.dtype)
        if header[0] == _LAST:
            rounds.contribute_last(worker, change, int(header[1]))
            return head(), None
        return head(), rounds.contribute(worker, change, int(header[1]))

    def held(self) -> list[Tensor]:
        """The outer weights; on the first worker also those that it holds for all, and the state of their optimizer."""
        if self._rounds is None:
            return [self._outer]
        states = self._rounds.optimizer.state.values()
        return [self._outer, self._rounds.weights, *(v for s in states for v in s.values() if isinstance(v, Tensor))]

    def answering_bytes(self) -> int:
        """Bytes of other workers' changes, and of the weights for them."""
        return self._exchange.answering_bytes()

    def state(self) -> dict[str, Tensor]:
        """Momentum of the outer optimizer, on the first worker."""
        if self._rounds is None:
            return {}
        momentum = self._rounds.optimizer.state.get(self._rounds.weights, {}).get("momentum_buffer")
        return {} if momentum is None else {"outer.momentum": momentum.clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue with the momentum of a saved run."""
        momentum = state.get("outer.momentum")
        if self._rounds is not None and momentum is not None and momentum.numel() == self._flat.total:
            self._rounds.optimizer.state[self._rounds.weights]["momentum_buffer"] = momentum.clone()

    def figures(self) -> dict[str, object]:
        """On the first worker, the number of rounds and of absences of workers."""
        if self._rounds is None:
            return {}
        return {"meetings": self._rounds.count, "absences": self._rounds.absences}

    def close(self) -> None:
        """Close the connection to the first worker."""
        self._exchange.close()
