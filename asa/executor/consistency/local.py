"""Local steps: workers train apart for a period, then average their weights (``local_sgd``).

Stich 2019, "Local SGD Converges Fast and Communicates Little"; the period may follow the quadratic synchronisation rule
of Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning". Running statistics are averaged at
every meeting. Momenta stay a worker's own; where an epoch ends they are averaged, so that there is one state to save.
"""

from __future__ import annotations

from torch import Tensor

from asa.executor.consistency.conduct import Conduct, average


class LocalSteps(Conduct):
    """The conduct of ``local_sgd``."""

    _since = 0

    def begin(self) -> None:
        """Nothing: all workers stand where training goes on from."""
        self._since = 0

    def step(self, batch: int) -> None:
        """An update of one's own, and a meeting where the period is over."""
        self.unscale(batch)
        self.optimizer.step()
        self._since += 1
        if self._since >= self.discipline.period_at(self.rate):
            self.meet()

    def meet(self) -> None:
        """Average weights and running statistics (collective)."""
        layout = self.model.layouts[0]
        share = layout.share(layout.data_index(self.model.position.place)) * self.axis.size if layout.weights else 1.0
        average([p for p in self.model.parameters() if p.requires_grad], self.axis, share)
        self.model.average_buffers()
        self._since = 0

    def settle(self) -> None:
        """A meeting, at which the optimizers' states are averaged, too."""
        if self._since:
            self.meet()
        self.model.average_buffers()
        average(self._moments(), self.axis)

    def _moments(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        return [v for s in states for v in s.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
