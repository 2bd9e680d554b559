"""Local SGD (``local_sgd``): workers train independently for a period, then average their weights.

After Stich 2019, "Local SGD Converges Fast and Communicates Little". The period may follow the quadratic
synchronization rule of Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning". Running
statistics are averaged together with the weights. Each worker has its own momentum. At the end of an epoch momenta are
averaged, so that there is one state to save. A worker without a state, because it took no step, gets that of the
others.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.executor.consistency.conduct import Conduct, average


class LocalSteps(Conduct):
    """Implements ``local_sgd``."""

    averages_statistics = "together with the weights"
    _steps_since = _own_samples = _all_samples = 0
    """Number of steps since the last average, and the numbers of samples in them: this worker's and all workers'."""
    _trained: frozenset[nn.Parameter] = frozenset()
    """Parameters that were trained since the last average."""
    _own_since_met = 0
    """Number of samples that this worker trained on since workers last synchronized."""

    def begin(self) -> None:
        """Reset the counters; all workers start from equal weights."""
        self._steps_since = self._own_samples = self._all_samples = 0
        self._own_since_met, self._trained = 0, frozenset()

    def step(self, batch: int) -> None:
        """Take a local step, and average weights if the period is over."""
        self.update(batch)
        self._count(batch)
        self._trained |= {p for p in self.model.parameters() if p.requires_grad}
        self._steps_since += 1
        self._own_samples += self.rows(batch)
        self._all_samples += batch
        if self._steps_since >= self.round_steps(self._steps_since):
            self.average_weights()

    def average_weights(self) -> None:
        """Average weights, each worker weighted by its samples, and running statistics (collective)."""
        share = self._own_samples * self.axis.size / self._all_samples
        average([p for p in self.model.parameters() if p in self._trained], self.axis, share)
        self.average_buffers()
        self._trained = frozenset()
        self._steps_since = self._own_samples = self._all_samples = 0

    def synchronize(self) -> None:
        """Average weights, running statistics and the optimizers' states (collective)."""
        if self._steps_since:
            self.average_weights()
        self.average_buffers()
        self._average_moments()

    def state(self) -> dict[str, Tensor]:
        """The last learning rate, if periods follow it; otherwise nothing."""
        known = {"local_sgd.rate": torch.tensor([self._rate_before], dtype=torch.float64)}
        return known if self.discipline.growth else {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue with the learning rate of a saved run."""
        if "local_sgd.rate" in state:
            self._rate_before = float(state["local_sgd.rate"])

    def _count(self, batch: int) -> None:
        self._own_since_met += self.rows(batch)

    def _average_moments(self) -> None:
        """Bring the optimizers to one state: moments are averaged, each worker weighted by its samples, as weights are;
        counters are those of the worker with most samples (collective)."""
        axis, own, self._own_since_met = self.axis, self._own_since_met, 0
        if axis.group is None:
            return
        counts = torch.zeros(axis.size, dtype=torch.float64, device=self.model.device)
        counts[axis.index] = own
        dist.all_reduce(counts, group=axis.group)
        if not counts.any():
            return
        self._create_missing_state()
        moments, counters = self._state_parts()
        average(moments, axis, own * axis.size / float(counts.sum()))
        if counters:
            flat = torch.stack([c.detach().double() for c in counters]).to(self.model.device)
            flat *= axis.index == int(counts.argmax())
            dist.all_reduce(flat, group=axis.group)
            for counter, value in zip(counters, flat.tolist(), strict=True):
                counter.fill_(value)

    @torch.no_grad()
    def _create_missing_state(self) -> None:
        """Make the optimizer create the state that other workers have and this one lacks, because it took no step of
        these parameters. It is zero, and no weight changes (collective)."""
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        has = [any(isinstance(v, Tensor) for v in self.optimizer.state.get(p, {}).values()) for p in parameters]
        needed = torch.tensor(has, dtype=torch.float32, device=self.model.device)
        dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self.axis.group)
        missing = [p for p, own, n in zip(parameters, has, needed.tolist(), strict=True) if n and not own]
        if not missing:
            return
        weights = [p.detach().clone() for p in missing]
        self.optimizer.zero_grad()
        for p in missing:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        for p, before in zip(missing, weights, strict=True):
            p.grad = None
            p.copy_(before)
            for value in self.optimizer.state[p].values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _state_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """(moments, counters) of the optimizer, in the same order on all workers. A counter, such as the number of
        steps, is one number for a parameter of any shape."""
        entries = [
            (p, key, value)
            for g in self.optimizer.param_groups
            for p in g["params"]
            for key, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor)
        ]
        numbers = {"step"} | {key for p, key, value in entries if p.dim() and not value.dim()}
        moments = [value for _, key, value in entries if key not in numbers and value.is_floating_point()]
        return moments, [value for _, key, value in entries if key in numbers]
