"""What changes of plan were measured to gain, compared with what the prices promised."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asa.interfaces.executor import Placement
from asa.ir.plan import Plan
from asa.scheduler.costs import LIKE
from asa.scheduler.model import same

_MOST_BIAS = math.log(1.25)


@dataclass
class Experience:
    """The plans that ran, and how wrong their prices turned out to be.

    A *bias* belongs to a plan on any ranks, whose speeds are in the price. A *penalty* belongs to a plan on the ranks
    on which it failed, and is halved by every search, because it may have failed for a reason that is over. Both are
    logarithms of measured over promised time.
    """

    ran: list[Placement] = field(default_factory=list)
    _biases: list[tuple[Plan, float]] = field(default_factory=list)
    _penalties: list[tuple[Placement, float]] = field(default_factory=list)

    def has_run(self, placement: Placement) -> bool:
        """Whether ``placement`` was the current one at a search."""
        return any(same(placement, p) for p in self.ran)

    def add(self, current: Placement) -> list[Placement]:
        """Add the current placement. Returns the others that ran."""
        if not self.has_run(current):
            self.ran.append(current)
        return self.others(current)

    def others(self, current: Placement) -> list[Placement]:
        """The placements that ran, without ``current``."""
        return [p for p in self.ran if not same(p, current)]

    def learn(self, plan: Plan, error: float) -> None:
        """Add half of ``error`` to the bias of ``plan``, which gained clearly more or less than promised. The other
        plan, or the state of the machine, may be priced wrongly as well."""
        if abs(error) > LIKE:
            bias = max(-_MOST_BIAS, min(_MOST_BIAS, self.bias(plan) + error / 2))
            self._biases = [(p, b) for p, b in self._biases if p.conduct != plan.conduct] + [(plan, bias)]

    def failed(self, placement: Placement, error: float) -> None:
        """Add a penalty to ``placement``, whose change was undone."""
        self._penalties.append((placement, max(0.0, error)))

    def searched(self) -> None:
        """Halve all penalties."""
        self._penalties = [(p, log / 2) for p, log in self._penalties]

    def bias(self, plan: Plan) -> float:
        """How much longer a step of ``plan`` takes than its price, compared with other plans."""
        return next((log for p, log in self._biases if p.conduct == plan.conduct), 0.0)

    def penalty(self, placement: Placement) -> float:
        """How much slower than its price a change to ``placement`` made a step, if it was undone."""
        return max((log for p, log in self._penalties if same(p, placement)), default=0.0)
