"""The oracle: value and peak of one choice by definition, and the best choice by brute force."""

from __future__ import annotations

from itertools import count, product
from math import prod

from asa.errors import UsageError
from asa.planner import clock
from asa.planner.stage.problem import Choice, Problem, Solution

LIMIT = 5_000_000
"""Number of choices above which brute force is refused, because it would take minutes."""
_LOOK = 256
"""Number of choices between two readings of the clock."""


def value(problem: Problem, choice: Choice) -> float:
    """Milliseconds of a step under ``choice``; infinite if two neighbours' layouts cannot be combined."""
    picked = [problem.configs[i][c] for i, c in enumerate(choice)]
    total = sum(c.work for c in picked)
    for edges, a, b in zip(problem.edges, picked, picked[1:], strict=False):
        edge = edges.get((a.layout, b.layout))
        if edge is None:
            return float("inf")
        total += edge.cost
    n = len(picked)
    tau = min(
        problem.sp * sum(picked[j].window for j in range(k))
        + problem.sc * sum(picked[j].prompt for j in range(k + 1, n))
        + problem.sc * sum(picked[j].late for j in range(n) if problem.release[j] > k)
        for k in range(n)
    )
    return total - problem.saving * tau


def peak(problem: Problem, choice: Choice) -> float:
    """GiB at the peak of a step under ``choice``."""
    picked = [problem.configs[i][c] for i, c in enumerate(choice)]
    n = len(picked)
    entry = [None, *(e.get((a.layout, b.layout)) for e, a, b in zip(problem.edges, picked, picked[1:], strict=False))]
    standing = sum(e.state for e in entry if e)
    received = [e.activations if e else 0.0 for e in entry]
    moving = [e.transient if e else 0.0 for e in entry]
    return max(
        sum(c.state for c in picked)
        + standing
        + sum(picked[j].activations + received[j] for j in range(k + 1))
        + sum(picked[j].gradients for j in range(k, n))
        + picked[k].transient
        + moving[k]
        for k in range(n)
    )


def solve(problem: Problem, ends: float = float("inf")) -> Solution:
    """The best choice, by trying all of them; the best one so far, without proof, if the clock reaches ``ends``
    (:mod:`asa.planner.clock`).

    Raises:
        UsageError: more than :data:`LIMIT` choices.
    """
    many = prod(len(c) for c in problem.configs)
    if many > LIMIT:
        raise UsageError(f"--solver exhaustive would try {many:.1e} plans, the most is {LIMIT:.0e}; use ilp or dp")
    best: Choice | None = None
    lowest, bound = float("inf"), None
    for number, choice in zip(count(1), product(*(range(len(c)) for c in problem.configs))):
        ms = value(problem, choice)
        if ms < lowest and peak(problem, choice) <= problem.capacity:
            best, lowest = choice, ms
        if number % _LOOK == 0 and clock.now() > ends:
            bound = 0.0
            break
    return Solution(choice=best, value=lowest, bound=lowest if bound is None else bound, solver="exhaustive")
