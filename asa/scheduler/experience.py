"""What changes of plan were measured to gain, compared with what the prices promised, and with staying."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass
class Departures:
    """The plans that were left, and the seconds that the run lost since, compared with staying on them: steps that
    would have been faster, and changes.

    Where the machine alternates, each change comes when its reason is nearly over. A return to a plan makes up for
    losses by what was gained without it, but what was gained beyond that is no reason to leave it again.
    """

    plans: list[Placement] = field(default_factory=list)
    _lost_s: list[float] = field(default_factory=list)

    def lost_s(self, placement: Placement) -> float:
        """Seconds lost by leaving ``placement`` so far; 0 if it was never left, or that paid."""
        lost = (s for p, s in zip(self.plans, self._lost_s, strict=True) if same(p, placement))
        return max(0.0, next(lost, 0.0))

    def ran(self, current: Placement, seconds: float, ratios: Sequence[float]) -> None:
        """Add ``seconds`` under ``current``; ``ratios``: time of a step under each of ``plans``, relative to it."""
        for i, (p, ratio) in enumerate(zip(self.plans, ratios, strict=True)):
            if not same(p, current):
                self._lost_s[i] += (1 - ratio) * seconds

    def moved(self, before: Placement, target: Placement, took_s: float) -> None:
        """Add a change from one plan to another that took ``took_s`` seconds."""
        if not any(same(before, p) for p in self.plans):
            self.plans.append(before)
            self._lost_s.append(0.0)
        back = [same(p, target) for p in self.plans]
        self._lost_s = [max(0.0, s + took_s) if b else s + took_s for s, b in zip(self._lost_s, back, strict=True)]
