"""Inner and outer optimizer (``diloco``): a worker's change of weights over a period is a gradient for the outer
optimizer.

After Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models". Fragments, one of
which is averaged every ``period / fragments`` steps, are after Douillard et al. 2025, "Streaming DiLoCo with
overlapping communication". The inner optimizer is the run's own. The outer one is SGD with Nesterov momentum, the same
on all workers. At the end of an epoch every changed fragment is averaged, and so are the inner momenta.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.executor.consistency.conduct import Conduct, average
from asa.executor.consistency.flat_parameters import FlatParameters, dequantised, quantised
from asa.executor.consistency.local_sgd import LocalSteps


class OuterSteps(LocalSteps):
    """Implements ``diloco``."""

    averages_statistics = Conduct.averages_statistics
    _weight = 1.0
    """Weight of this worker in the mean; the weights of all workers sum to their number."""

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
        self._steps, self._has_changed = 0, [False] * len(self._outer)
        self._samples_since = [(0, 0)] * len(self._outer)

    def step(self, batch: int) -> None:
        """Take an inner step, and average the fragment whose turn it is."""
        self._inner_step(batch)
        self._steps += 1
        self._samples_since = [(own + self.rows(batch), total + batch) for own, total in self._samples_since]
        self._has_changed = [True] * len(self._outer)
        turn, remainder = divmod(self._steps, self.discipline.period // len(self._outer))
        if not remainder:
            self._average_weighted((turn - 1) % len(self._outer))

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
        """Take one outer step along the mean of all workers' changes (collective)."""
        start, stop = self._bounds[fragment]
        if start == stop:  # more fragments than parameters
            return
        outer, (first, last) = self._outer[fragment], self._fragments[fragment]
        weights = self._flat.row(first, last)
        outer.grad = self._mean_change(outer.detach() - weights, self._flat.sizes[first:last])
        self._optimizers[fragment].step()
        outer.grad = None
        self._flat.put(outer.detach(), start)
        if self.model.grouped is not None:
            self.model.share_updates()
        self._has_changed[fragment] = False

    def _mean_change(self, change: Tensor, sizes: list[int]) -> Tensor:
        """Mean of ``change`` over workers (collective). In int8, every worker's part is sent with its own scales."""
        axis = self.axis
        if axis.group is None:
            return change
        if self._weight != 1:
            change = change * self._weight
        if self.discipline.message == "fp32":
            average([change], axis)
            return change
        numbers, scales = quantised(change, sizes)
        all_numbers, all_scales = ([torch.empty_like(t) for _ in range(axis.size)] for t in (numbers, scales))
        dist.all_gather(all_numbers, numbers, group=axis.group)
        dist.all_gather(all_scales, scales, group=axis.group)
        parts = [dequantised(n, s, sizes) for n, s in zip(all_numbers, all_scales, strict=True)]
        return torch.stack(parts).mean(dim=0)

    def synchronize(self) -> None:
        """Average all changed fragments, running statistics and inner momenta (collective)."""
        for fragment, changed in enumerate(self._has_changed):
            if changed:
                self._average_weighted(fragment)
        self._steps = 0
        self.average_buffers()
        average(self._moments(), self.axis)

    def held(self) -> list[Tensor]:
        """The outer weights and the state of their optimizers."""
        states = [s for o in self._optimizers for s in o.state.values()]
        return [*self._outer, *(v for s in states for v in s.values() if isinstance(v, Tensor))]

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
