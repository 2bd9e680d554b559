"""Federated averaging (``fedavg``): clients train on their own data, and a weighted mean of their updates is applied.

After McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data". Every worker is
a client. In a round of ``period`` steps, a random ``fraction`` of the clients trains from the same weights. Their
updates are averaged, weighted by their numbers of samples.

With a ``spread`` above 0, a client keeps one part of the training set. Its classes and its size follow a Dirichlet
distribution of concentration ``1 / spread`` (Hsu et al. 2019). Otherwise clients take their shares of the run's order,
and are weighted by their samples in the round.

A client that takes no part in a round keeps its momentum for the next round in which it does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from asa.errors import UsageError
from asa.executor.consistency.conduct import average_statistics
from asa.executor.consistency.diloco import OuterSteps
from asa.executor.consistency.local_sgd import LocalSteps
from asa.executor.model.step import microbatch_rows
from asa.zoo.data import ImageSet


class FederatedAverage(OuterSteps):
    """Implements ``fedavg``: its outer optimizer adds the mean of the clients' updates unchanged."""

    averages_statistics = LocalSteps.averages_statistics
    _round = _round_samples = 0
    _image_set: ImageSet | None = None
    _own_indices = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Start a round from the weights, which are equal on all clients."""
        super().begin()
        self.has_own_samples = self.discipline.spread > 0
        self._round_samples = 0
        self._draw_clients()

    def notes(self) -> list[str]:
        """Notes, with the number of clients of a round if ``fraction`` is not a whole number of them."""
        count, chosen = self.axis.size, self._clients_of_round
        if math.isclose(chosen, self.discipline.fraction * count):
            return super().notes()
        asked = f"a fraction of {self.discipline.fraction:g} is no whole number of them"
        return [*super().notes(), f"fedavg: {chosen} of {count} clients take part in each round; {asked}"]

    @property
    def _clients_of_round(self) -> int:
        return max(1, math.ceil(self.discipline.fraction * self.axis.size - 1e-9))

    def _draw_clients(self) -> None:
        """Draw the clients that take part in the next round."""
        count, chosen = self.axis.size, self._clients_of_round
        participants = random.Random(f"clients {self.model.context.seed} {self._round}").sample(range(count), chosen)
        self.takes_part = self.axis.index in participants

    def own_samples(self, images: ImageSet, indices: Tensor, step: int) -> Tensor:
        """``indices`` with this client's own samples in its rows. Each of its samples is used once, in a new order,
        before any is repeated."""
        if not self.has_own_samples:
            return indices
        if self._image_set is not images:
            seed = self.model.context.seed
            parts = clients(images.labels.tolist(), self.axis.size, self.discipline.spread, seed)
            self._image_set, self._own_indices = images, torch.tensor(parts[self.axis.index], dtype=torch.int64)
        mixed, size = indices.clone(), len(self._own_indices)
        rows = microbatch_rows(self.model, len(indices))
        positions = torch.cat([torch.arange(part.kept.start, part.kept.stop) for part in rows])
        at = step * self.rows(self.model.plan.global_batch) + torch.arange(len(positions))
        for number in (at // size).unique().tolist():
            in_pass = at // size == number
            mixed[positions[in_pass]] = self._own_indices[self._shuffled(size, number)[at[in_pass] % size]]
        return mixed

    def _shuffled(self, size: int, number: int) -> Tensor:
        order = list(range(size))
        random.Random(f"pass {self.model.context.seed} {self.axis.index} {number}").shuffle(order)
        return torch.tensor(order)

    def step(self, batch: int) -> None:
        """Take a local step if this client takes part in the round, and average if the round is over."""
        if self.takes_part:
            self._round_samples += self.rows(batch)
        super().step(batch)

    def _inner_step(self, batch: int) -> None:
        if self.takes_part:
            super()._inner_step(batch)

    def _average_fragment(self, fragment: int) -> None:
        """Set the weights of all clients to the weighted mean, and begin the next round (collective)."""
        counts = (len(self._own_indices) or self._round_samples) if self._round_samples else 0
        total = torch.tensor([float(counts)], dtype=torch.float64, device=self.model.device)
        if self.axis.group is not None:
            dist.all_reduce(total, group=self.axis.group)
        self._weight = counts * self.axis.size / float(total)
        buffers = [b for c in self.model.components for b in c.buffers() if b.is_floating_point()]
        average_statistics(buffers, self.axis, self._weight)
        super()._average_fragment(fragment)
        self._round_samples, self._round = 0, self._round + 1
        self._draw_clients()

    def _count(self, batch: int) -> None:
        if self.takes_part:
            super()._count(batch)

    def state(self) -> dict[str, Tensor]:
        """The number of the next round, which determines who takes part."""
        return {"fedavg.round": torch.tensor([self._round])}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue with the round of a saved run."""
        if "fedavg.round" in state:
            self._round = int(state["fedavg.round"])
            self._draw_clients()


def clients(labels: Sequence[int], count: int, spread: float, seed: int) -> list[list[int]]:
    """Indices of the samples of each of ``count`` clients.

    The shares of every class are drawn from a Dirichlet distribution of concentration ``1 / spread``. A client without
    samples gets one from the largest client.

    Raises:
        UsageError: there are fewer samples than clients.

    >>> parts = clients([0, 1] * 50, 4, spread=2.0, seed=0)
    >>> sorted(sum(parts, [])) == list(range(100))
    True
    """
    if len(labels) < count:
        raise UsageError(f"{len(labels)} samples are too few for {count} clients; train on at most {len(labels)} ranks")
    draws = random.Random(f"spread {seed}")
    parts: list[list[int]] = [[] for _ in range(count)]
    for class_ in sorted(set(labels)):
        of_class = [i for i, label in enumerate(labels) if label == class_]
        draws.shuffle(of_class)
        shares = [draws.gammavariate(1 / spread, 1.0) for _ in range(count)]
        if not sum(shares):  # all too small for a float
            shares[draws.randrange(count)] = 1.0
        cuts = [round(len(of_class) * x / sum(shares)) for x in accumulate(shares, initial=0.0)]
        for part, (a, b) in zip(parts, pairwise(cuts), strict=True):
            part += of_class[a:b]
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts
