"""What lies beside a choice that fits, against the definition of the problem; and solvers that take turns."""

from __future__ import annotations

import random
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import random_problems

from asa.planner import clock
from asa.planner.budget import USUAL
from asa.planner.stage import dual, exhaustive, labels
from asa.planner.stage.labels import descended
from asa.planner.stage.lookup import FormulatedStage
from asa.planner.stage.pareto import OutOfTimeError, efficient
from asa.planner.stage.problem import Choice, Problem
from asa.planner.stage.singles import Single

INF = float("inf")


def fits(problem: Problem, choice: Choice) -> bool:
    return exhaustive.value(problem, choice) < INF and exhaustive.peak(problem, choice) <= problem.capacity


def begin(rng: random.Random, problem: Problem) -> tuple[dual.Arrays, list[int]] | None:
    """A choice that fits, drawn from all of them, in rows of the arrays."""
    every = [c for c in product(*(range(len(x)) for x in problem.configs)) if fits(problem, c)]
    if not every:
        return None
    x, drawn = dual.Arrays(problem), rng.choice(every)
    return x, [int(np.flatnonzero(x.index[i] == c)[0]) for i, c in enumerate(drawn)]


def beside(problem: Problem, choice: Choice, changes: int) -> list[Choice]:
    """Choices that differ from it in so many components at most, and fit."""
    found = []
    for where in combinations(range(len(choice)), changes):
        for new in product(*(range(len(problem.configs[i])) for i in where)):
            other = list(choice)
            for i, c in zip(where, new, strict=True):
                other[i] = c
            found.append(tuple(other))
    return [c for c in found if fits(problem, c)]


@pytest.mark.parametrize("seed", range(6))
def test_no_change_of_one_component_gains_after_a_descent(seed):
    rng, moved, optimal, tried = random.Random(seed), 0, 0, 0
    for k in range(12):
        problem = random_problems.draw(rng, components=4, configs=5, most=500, tight=k % 3 > 0)
        begun = begin(rng, problem)
        if begun is None:
            continue
        x, picked = begun
        before = x.evaluate(picked).value
        assert before == pytest.approx(exhaustive.value(problem, x.choice(picked)), rel=1e-9)
        found = descended(x, picked)
        choice = x.choice(found.picked)
        assert found.value == pytest.approx(exhaustive.value(problem, choice), rel=1e-9)
        assert fits(problem, choice)
        assert found.value <= before
        least = min(exhaustive.value(problem, c) for c in beside(problem, choice, 1))
        assert least >= found.value * (1 - 1e-8)
        moved += found.value < before
        tried += 1
        optimal += found.value <= exhaustive.solve(problem).value * (1 + 1e-9)
    assert moved > tried / 2
    assert optimal > tried / 2


def test_the_clock_ends_a_long_comparison():
    rows = np.random.default_rng(0).random((2_000, 6))
    assert len(efficient(rows, np.zeros(2_000))) > 200
    with pytest.raises(OutOfTimeError):
        efficient(rows, np.zeros(2_000), clock.now() - 1)


def test_labels_that_run_out_of_time_keep_what_they_know():
    problem = random_problems.draw(random.Random(3), components=5, configs=4, tight=True)
    solver = labels.Solver(problem)
    solver.price()
    before = (solver.bound, solver.value, solver.picked)
    solver.run(INF, clock.now() - 1)
    assert (solver.bound, solver.value, solver.picked) == before


@pytest.mark.parametrize(("solver", "asked"), [("ilp", ["labels", "labels", "ilp", "labels", "ilp"]),
                                               ("dp", ["labels"] * 5)])  # fmt: skip
def test_labels_and_the_ilp_take_turns(monkeypatch, solver, asked):
    problem = random_problems.draw(random.Random(5), components=5, configs=4, tight=True)
    single = Single(SimpleNamespace(budget=USUAL), 0.0, problem.width, 1, solver)
    single.stage, single._decided = FormulatedStage(SimpleNamespace(problem=problem), ilp_ways=0), True
    said: list[str] = []
    monkeypatch.setattr(labels.Solver, "run", lambda *_args: said.append("labels"))
    monkeypatch.setattr(Single, "_by_ilp", lambda *_args: said.append("ilp"))
    monkeypatch.setattr(labels.Solver, "answer", lambda *_args: SimpleNamespace(bound=0.0, value=INF))
    single.level = 8  # slices long enough
    for _ in range(5):
        single._solve(INF, INF)
    assert said == asked
