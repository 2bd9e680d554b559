"""A cost model that believes what plans promise, so that the adaptive loop changes plans when a test wants it to."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import nouns
import training

from asa.interfaces.executor import Placement
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.scheduler.costs import Slowness
from asa.scheduler.model import Model


class Promising(Model):
    """Every plan takes what it promises, whatever was measured; the best plan is ``answer``, or an error.

    ``asked``: what was known of the costs each time it was.
    """

    answer: Plan | Exception
    asked: list[Slowness]
    seconds: float

    def __init__(self, answer: Plan | Exception, *, move_s: float = 0.0) -> None:
        parts = [SimpleNamespace(batch_norm=False) for _ in training.COMPONENTS["cnn"]]
        profile: Any = SimpleNamespace(graph=SimpleNamespace(components=parts))
        nothing: Any = None
        super().__init__(profile=profile, cluster=nouns.cluster(4), strategies=nothing, solve=nothing)
        self.__dict__.update(answer=answer, seconds=move_s, asked=[])

    def expected(self, plan: Plan, processes: Sequence[int]) -> Any:
        """Of the step, and all of it on every rank; nothing of transfers."""
        step_s = plan.prediction.step_time_s
        own_s = (step_s,) * plan.num_ranks
        return SimpleNamespace(step_s=step_s, own_s=own_s, message=lambda _: None, levels=frozenset())

    def step_s(self, placement: Placement, slowness: Slowness) -> float:
        """As promised."""
        return placement.plan.prediction.step_time_s

    def best(self, placement: Placement, measured: Measurements, slowness: Slowness) -> list[Placement]:
        """As wanted."""
        self.asked.append(slowness)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [Placement(plan=self.answer, processes=tuple(range(self.answer.num_ranks)))]

    def draws(self, costs: Any, slowness: Slowness, placements: Sequence[Placement], count: int, seed: int) -> Any:
        """All alike."""
        return [tuple(self.step_s(p, slowness) for p in placements)] * count

    def move_s(self, old: Placement, new: Placement, slowness: Slowness) -> float:
        """As told."""
        return self.seconds
