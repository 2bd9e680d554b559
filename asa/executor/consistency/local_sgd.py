"""Local SGD (``local_sgd``): workers train independently for a period, then average their weights.

After Stich 2019, "Local SGD Converges Fast and Communicates Little". The period may follow the quadratic
synchronization rule of Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning". Running
statistics are averaged together with the weights. Each worker has its own momentum. At the end of an epoch momenta are
averaged, so that there is one state to save.
"""

from __future__ import annotations

from torch import Tensor

from asa.executor.consistency.conduct import Conduct, average


class LocalSteps(Conduct):
    """Implements ``local_sgd``."""

    averages_statistics = "together with the weights"
    _steps_since = _own_samples = _all_samples = 0
    """Number of steps since the last average, and the numbers of samples in them: this worker's and all workers'."""
    _own_since_met = _all_since_met = 0
    """Numbers of samples since workers last synchronized: this worker's and all workers'."""

    def begin(self) -> None:
        """Reset the counters; all workers start from equal weights."""
        self._steps_since = self._own_samples = self._all_samples = 0
        self._own_since_met = self._all_since_met = 0

    def step(self, batch: int) -> None:
        """Take a local step, and average weights if the period is over."""
        self.update(batch)
        self._count(batch)
        self._steps_since += 1
        self._own_samples += self.rows(batch)
        self._all_samples += batch
        if self._steps_since >= self.period_now():
            self.average_weights()

    def average_weights(self) -> None:
        """Average weights, each worker weighted by its samples, and running statistics (collective)."""
        share = self._own_samples * self.axis.size / self._all_samples
        average([p for p in self.model.parameters() if p.requires_grad], self.axis, share)
        self.average_buffers()
        self._steps_since = self._own_samples = self._all_samples = 0

    def synchronize(self) -> None:
        """Average weights, running statistics and the optimizers' states (collective)."""
        if self._steps_since:
            self.average_weights()
        self.average_buffers()
        self._average_moments()

    def _count(self, batch: int) -> None:
        self._own_since_met += self.rows(batch)
        self._all_since_met += batch

    def _average_moments(self) -> None:
        """Average the optimizers' states, each worker weighted by its samples, as weights are (collective)."""
        total = self._all_since_met
        average(self._moments(), self.axis, self._own_since_met * self.axis.size / total if total else 1.0)
        self._own_since_met = self._all_since_met = 0

    def _moments(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        return [v for s in states for v in s.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
