"""The label program as the planner runs it: prices first, then passes, until proved or out of time."""

from __future__ import annotations

import time

from asa.planner.stage.labels import Solver
from asa.planner.stage.problem import Problem, Solution

INF = float("inf")


def solve(problem: Problem, *, time_limit_s: float = 60.0, cutoff: float = INF, gap: float = 0.0) -> Solution:
    """The best choice below ``cutoff`` and its bound; a choice within ``gap`` of the bound is good enough."""
    ends = time.monotonic() + time_limit_s
    found = Solver(problem)
    if found.bound < cutoff and time_limit_s > 0:
        found.price(cutoff, gap)
    found.run(cutoff, ends, gap)
    return found.answer(cutoff)
