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

    _since = _mine = _all = 0
    """Number of steps since the last average, and the numbers of samples in them: this worker's and all workers'."""

    def begin(self) -> None:
        """Reset the counters; all workers start from equal weights."""
        self._since = self._mine = self._all = 0

    def step(self, batch: int) -> None:
        """Take a local step, and average weights if the period is over."""
        self.update(batch)
        self._since, self._mine, self._all = self._since + 1, self._mine + self.rows(batch), self._all + batch
        if self._since >= self.discipline.period_at(self.rate):
            self.meet()

    def meet(self) -> None:
        """Average weights, each worker weighted by its samples, and running statistics (collective)."""
        share = self._mine * self.axis.size / self._all
        average([p for p in self.model.parameters() if p.requires_grad], self.axis, share)
        self.average_buffers()
        self._since = self._mine = self._all = 0

    def settle(self) -> None:
        """Average weights, running statistics and the optimizers' states (collective)."""
        if self._since:
            self.meet()
        self.average_buffers()
        average(self._moments(), self.axis)

    def _moments(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        return [v for s in states for v in s.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
