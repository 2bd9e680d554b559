"""Inner and outer optimizer (``diloco``): a worker's change of weights over a period is a gradient for the outer
optimizer.

After Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models". Fragments, one of
which is averaged every ``period / fragments`` steps, are after Douillard et al. 2025, "Streaming DiLoCo with
overlapping communication"; so is the overlap: a fragment's changes are sent, and workers compute ``overlap`` steps more
before they take the outer step. What a worker has changed meanwhile is added to the result, so that no step is lost
(in the paper both are mixed). The inner optimizer is the run's own. The outer one is SGD with Nesterov momentum, the
same on all workers. At the end of an epoch every changed fragment is averaged, and so are the inner momenta.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.executor.consistency.conduct import Conduct
from asa.executor.consistency.flat_parameters import FlatParameters, dequantised, quantised
from asa.executor.consistency.local_sgd import LocalSteps


class _Sent(NamedTuple):
    """A ``fragment`` on its way: its ``weights`` when it was sent, the ``messages``, and a function that waits for the
    mean change."""

    fragment: int
    weights: Tensor
    messages: list[Tensor]
    mean: Callable[[], Tensor]


class OuterSteps(LocalSteps):
    """Implements ``diloco``."""

    averages_statistics = Conduct.averages_statistics
    _weight = 1.0
    """Weight of this worker in the mean; the weights of all workers sum to their number."""
    _sent: _Sent | None = None

    def begin(self) -> None:
        """Copy the weights, which are equal on all workers, as outer weights, and create the outer optimizers."""
        self._flat = FlatParameters(self.optimizer)
        self._fragments = fragments(self._flat.sizes, self.discipline.fragments)
        at = [0]
        for size in self._flat.sizes:
            at.append(at[-1] + size)
        self._bounds = [(at[a], at[b]) for a, b in self._fragments]
        weights = self._flat.weights().to(self.model.device)
        self._outer = [nn.Parameter(weights[a:b].clone()) for a, b in self._bounds]
        d = self.discipline
        self._optimizers = [
            torch.optim.SGD([p], lr=d.outer_rate, momentum=d.outer_momentum, nesterov=d.outer_momentum > 0)
            for p in self._outer
        ]
        self._own_since_met = 0
        self._steps, self._has_changed, self._sent = 0, [False] * len(self._outer), None
        self._samples_since = [(0, 0)] * len(self._outer)

    def step(self, batch: int) -> None:
        """Take an inner step, and average the fragment whose turn it is."""
        self._flat.check_trained(self.discipline)
        self._inner_step(batch)
        self._count(batch)
        self._steps += 1
        self._samples_since = [(own + self.rows(batch), total + batch) for own, total in self._samples_since]
        self._has_changed = [True] * len(self._outer)
        turn, remainder = divmod(self._steps, self.discipline.period // len(self._outer))
        if not remainder:
            self._average_weighted((turn - 1) % len(self._outer))
        elif remainder == self.discipline.overlap:
            self._receive()

    def _inner_step(self, batch: int) -> None:
        self.update(batch)

    def _average_weighted(self, fragment: int) -> None:
        """Average one fragment, each worker weighted by its samples since the last time (collective)."""
        own, total = self._samples_since[fragment]
        self._weight = own * self.axis.size / total
        self._average_fragment(fragment)
        self._samples_since[fragment] = (0, 0)

    @torch.no_grad()
    def _average_fragment(self, fragment: int) -> None:
        """Send this worker's change, and without overlap take the outer step (collective)."""
        weights, (first, last) = self._weights_of(fragment), self._fragments[fragment]
        change = self._outer[fragment].detach() - weights
        self._sent = _Sent(fragment, weights, *self._mean_change(change, self._flat.sizes[first:last]))
        self._has_changed[fragment] = False
        if not self.discipline.overlap:
            self._receive()

    @torch.no_grad()
    def _receive(self) -> None:
        """Take one outer step along the mean of all workers' changes that were sent, if any (collective)."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        outer = self._outer[sent.fragment]
        outer.grad = sent.mean()
        self._optimizers[sent.fragment].step()
        outer.grad = None
        weights = outer.detach()
        if self.discipline.overlap:
            weights = weights + (self._weights_of(sent.fragment) - sent.weights)
        self._flat.put(weights, self._bounds[sent.fragment][0])
        if self.model.grouped is not None:
            self.model.share_updates()

    def _weights_of(self, fragment: int) -> Tensor:
        """Copy of this worker's weights of a fragment. It may be empty: there can be more fragments than parameters,
        and a rank of a group may hold none of it. The ranks of a group still take every outer step together."""
        first, last = self._fragments[fragment]
        return self._flat.row(first, last) if last > first else self._outer[fragment].detach().clone()

    def _mean_change(self, change: Tensor, sizes: list[int]) -> tuple[list[Tensor], Callable[[], Tensor]]:
        """Begin to average ``change`` over workers; returns the messages, and a function that waits for the mean (both
        collective). In int8, every worker's part is sent with its own scales."""
        axis = self.axis
        if axis.group is None or not change.numel():
            return [change], lambda: change
        if self._weight != 1:
            change = change * self._weight
        if self.discipline.message == "fp32":
            work = dist.all_reduce(change, group=axis.group, async_op=True)

            def mean() -> Tensor:
                work.wait()
                return change / axis.size

            return [change], mean
        numbers, scales = quantised(change, sizes)
        gathered = [[torch.empty_like(t) for _ in range(axis.size)] for t in (numbers, scales)]
        works = [
            dist.all_gather(every, own, group=axis.group, async_op=True)
            for every, own in zip(gathered, (numbers, scales), strict=True)
        ]

        def mean_of_int8() -> Tensor:
            for each in works:
                each.wait()
            parts = [dequantised(n, s, sizes) for n, s in zip(*gathered, strict=True)]
            return torch.stack(parts).mean(dim=0)

        return [numbers, scales, *gathered[0], *gathered[1]], mean_of_int8

    def synchronize(self) -> None:
        """Average all changed fragments, running statistics and inner momenta (collective)."""
        self._receive()
        for fragment, changed in enumerate(self._has_changed):
            if changed:
                self._average_weighted(fragment)
                self._receive()
        self._steps = 0
        self.average_buffers()
        self._average_moments()

    def held(self) -> list[Tensor]:
        """The outer weights, the state of their optimizers, and what is on its way."""
        states = [s for o in self._optimizers for s in o.state.values()]
        sent = [self._sent.weights, *self._sent.messages] if self._sent is not None else []
        return [*self._outer, *sent, *(v for s in states for v in s.values() if isinstance(v, Tensor))]

    def state(self) -> dict[str, Tensor]:
        """Momentum of the outer optimizer as one vector over all weights; with groups, one vector per rank of a group
        (collective)."""
        momenta = [
            o.state.get(p, {}).get("momentum_buffer") for o, p in zip(self._optimizers, self._outer, strict=True)
        ]
        if any(m is None for m in momenta):
            return {}
        momentum = {self._key(): torch.cat([m.cpu() for m in momenta if m is not None])}
        return momentum if self.model.grouped is None else self.model.grouped.united(momentum)

    def _key(self) -> str:
        return "outer.momentum" if self.model.grouped is None else f"outer.momentum.{self.model.rank}"

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue with the momentum of a saved run."""
        momentum = state.get(self._key())
        if momentum is None or momentum.numel() != self._flat.total:
            return
        for optimizer, p, (a, b) in zip(self._optimizers, self._outer, self._bounds, strict=True):
            optimizer.state[p]["momentum_buffer"] = momentum[a:b].to(p.device, p.dtype).clone()


def fragments(sizes: list[int], count: int) -> list[tuple[int, int]]:
    """First and last (exclusive) parameter of each of ``count`` fragments with about equally many elements.

    >>> fragments([4, 1, 1, 2], 2), fragments([9, 1], 3)
    ([(0, 1), (1, 4)], [(0, 1), (1, 1), (1, 2)])
    """
    total, before, cuts = sum(sizes), 0, [0]
    for i, size in enumerate(sizes):
        while len(cuts) < count and before + size / 2 > total * len(cuts) / count:
            cuts.append(i if before else i + 1)
        before += size
    cuts += [len(sizes)] * (count + 1 - len(cuts))
    return list(pairwise(cuts))
