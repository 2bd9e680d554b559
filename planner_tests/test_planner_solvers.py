"""Three solvers, one suite: brute force is the oracle, the ILP and the DP are held to it and to each other."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import label_program
import numpy as np
import pulp
import pytest
import random_problems
from tables import some

from asa.errors import AsaError, UnavailableError, UsageError
from asa.ir.plan import DataDegree, TensorDegree
from asa.planner import search
from asa.planner.budget import USUAL
from asa.planner.stage import dual, exhaustive, ilp, memory
from asa.planner.stage.lookup import FormulatedStage
from asa.planner.stage.problem import Config, Edge, Problem, Solution
from asa.planner.stage.singles import Single


def same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-6 * max(1.0, abs(a))


def small(rng: random.Random) -> Problem:
    """Up to 8 components of up to 6 configurations, as long as brute force takes milliseconds."""
    components, configs, tight = rng.randint(1, 8), rng.randint(1, 6), rng.random() < 0.6
    return random_problems.draw(rng, components=components, configs=configs, most=400, tight=tight)


@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_brute_force_ilp_and_dp_agree(seed):
    rng, feasible = random.Random(seed), 0
    for _ in range(100):
        problem = small(rng)
        oracle, label, linear = exhaustive.solve(problem), label_program.solve(problem), ilp.solve(problem)
        assert label.proved
        assert linear.proved
        assert (oracle.choice is None) == (label.choice is None) == (linear.choice is None)
        assert same(oracle.value, label.value)
        assert same(oracle.value, linear.value)
        for found in (label, linear):
            if found.choice is not None:
                feasible += 1
                assert same(exhaustive.value(problem, found.choice), found.value)
                assert exhaustive.peak(problem, found.choice) <= problem.capacity + 1e-5
    assert feasible > 60, "the draw must not be all infeasible"


def test_ilp_and_dp_agree_beyond_brute_force():
    rng = random.Random(7)
    for _ in range(12):
        problem = random_problems.draw(rng, components=8, configs=6)
        lean = memory.least_memory(problem)
        roomy = label_program.solve(problem)
        assert lean.choice is not None
        assert roomy.choice is not None
        # Between the leanest plan and the fastest one the limit binds.
        limit = (lean.value + exhaustive.peak(problem, roomy.choice)) / 2
        tight = replace(problem, capacity=limit)
        a, b = ilp.solve(tight), label_program.solve(tight)
        assert a.choice is not None
        assert same(a.value, b.value)
        assert same(exhaustive.value(tight, a.choice), a.value)


def test_the_leanest_plan_is_the_leanest():
    rng = random.Random(3)
    for _ in range(60):
        problem = random_problems.draw(rng, components=rng.randint(1, 4), configs=5)
        found = memory.least_memory(problem)
        assert found.choice is not None
        assert found.value == pytest.approx(exhaustive.peak(problem, found.choice))
        assert exhaustive.solve(replace(problem, capacity=found.value * (1 + 1e-9))).choice is not None
        assert exhaustive.solve(replace(problem, capacity=found.value * (1 - 1e-6))).choice is None


def simple(**changes: float) -> Problem:
    """Two components of one layout; every number counts in the optimum."""
    base = {
        "work": 10.0, "window": 4.0, "prompt": 2.0, "late": 1.0, "state": 1.0, "activations": 1.0, "gradients": 0.5,
        "transient": 0.25,
    }  # fmt: skip

    def config(**own: float) -> Config:
        return Config(
            layout=0,
            data=DataDegree(strategy="replicate", degree=4),
            tensor=TensorDegree(strategy="none", degree=1),
            **{**base, **own},
        )

    first = config(late=0.0)
    second = config(**changes)
    return Problem(
        width=4,
        num_microbatches=1,
        names=("a", "b"),
        layouts=(random_problems.LAYOUTS[0],),
        configs=((first,), (second,)),
        edges=({(0, 0): Edge(cost=0.5)},),
        release=(0, 0),
        saving=0.8,
        sp=1.1,
        sc=1.2,
        capacity=100.0,
    )


@pytest.mark.parametrize("field", ["work", "prompt"])
def test_a_perturbed_coefficient_breaks_the_agreement(field):
    right = simple()
    wrong = simple(**{field: {"work": 10.01, "prompt": 2.5}[field]})
    assert same(ilp.solve(right).value, label_program.solve(right).value)
    assert not same(ilp.solve(wrong).value, label_program.solve(right).value)
    assert not same(ilp.solve(right).value, label_program.solve(wrong).value)


@pytest.mark.parametrize("seed", range(3))
def test_scaling_all_times_scales_the_answer_and_nothing_else(seed):
    problem = random_problems.draw(random.Random(seed), components=5, configs=4)
    scaled = replace(
        problem,
        configs=tuple(
            tuple(replace(c, work=3 * c.work, window=3 * c.window, prompt=3 * c.prompt, late=3 * c.late) for c in row)
            for row in problem.configs
        ),
        edges=tuple({k: replace(e, cost=3 * e.cost) for k, e in edges.items()} for edges in problem.edges),
    )
    one, three = label_program.solve(problem), label_program.solve(scaled)
    assert one.choice == three.choice
    assert three.value == pytest.approx(3 * one.value)


def test_more_memory_never_gives_a_slower_optimum():
    rng = random.Random(11)
    for _ in range(20):
        problem = random_problems.draw(rng, components=4, configs=5)
        values = [label_program.solve(replace(problem, capacity=c)).value for c in (2, 4, 6, 8, 12, 20)]
        assert values == sorted(values, reverse=True)


def test_a_planted_optimum_is_found():
    rng = random.Random(5)
    problem = random_problems.draw(rng, components=8, configs=6)
    planted = tuple(rng.randrange(len(row)) for row in problem.configs)
    cheap = replace(
        problem,
        configs=tuple(
            tuple(replace(c, work=c.window + c.prompt + c.late + (0 if k == p else 50)) for k, c in enumerate(row))
            for row, p in zip(problem.configs, planted, strict=True)
        ),
        edges=tuple(dict.fromkeys(e, Edge(cost=0.0)) for e in problem.edges),
    )
    assert label_program.solve(cheap).choice == planted
    assert ilp.solve(cheap).choice == planted


def test_local_moves_never_improve_an_optimum():
    rng = random.Random(13)
    for _ in range(5):
        problem = random_problems.draw(rng, components=7, configs=6)
        found = label_program.solve(problem)
        assert found.choice is not None
        for _ in range(400):
            moved = list(found.choice)
            for i in rng.sample(range(7), rng.randint(1, 3)):
                moved[i] = rng.randrange(len(problem.configs[i]))
            assert exhaustive.value(problem, tuple(moved)) >= found.value - 1e-9


def test_no_time_is_no_proof():
    problem = random_problems.draw(random.Random(1), components=8, configs=6)
    found = label_program.solve(problem, time_limit_s=0.0)
    best = label_program.solve(problem).value
    assert found.bound <= best + 1e-9
    assert found.choice is None or found.value >= best - 1e-9


def test_without_its_solver_the_ilp_says_what_to_install(monkeypatch):
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(UnavailableError, match="pip install highspy"):
        ilp.solve(random_problems.draw(random.Random(23), components=2, configs=2))


def test_forbidden_choices_leave_the_next_best():
    problem = random_problems.draw(random.Random(31), components=3, configs=4)
    first = ilp.solve(problem)
    assert first.choice is not None
    second = ilp.solve(problem, forbidden=(first.choice,))
    assert second.choice not in (None, first.choice)
    assert second.value >= first.value - 1e-9


def test_brute_force_refuses_what_would_take_hours():
    problem = random_problems.draw(random.Random(2), components=20, configs=6)
    with pytest.raises(UsageError, match="exhaustive"):
        exhaustive.solve(problem)


def test_a_problem_refuses_buckets_that_overlap():
    problem = random_problems.draw(random.Random(2), components=4, configs=2)
    with pytest.raises(ValueError, match="release"):
        replace(problem, release=(0, 0, 0, 1))
    with pytest.raises(ValueError, match="negative saving"):
        replace(problem, saving=-0.1)


def test_where_two_proofs_differ_the_definition_decides(caplog):
    problem = random_problems.draw(random.Random(37), components=4, configs=4)
    best = label_program.solve(problem)
    assert best.choice is not None
    other = ilp.solve(problem, forbidden=(best.choice,)).choice
    assert other is not None
    worse = Solution(choice=other, value=exhaustive.value(problem, other), bound=best.value, solver="other")
    wrong = replace(worse, bound=worse.value)
    assert search._arbitrate(best, wrong, float("inf"), problem) == best
    assert "other" in caplog.text
    liar = replace(best, value=best.value / 2, bound=best.value / 2, solver="liar")
    with pytest.raises(AsaError, match="liar prices its plan"):
        search._arbitrate(best, liar, float("inf"), problem)


@pytest.mark.parametrize("seed", range(2))
def test_the_label_program_in_arrays_finds_what_brute_force_finds(seed):
    rng, feasible = random.Random(100 + seed), 0
    for _ in range(60):
        problem = small(rng)
        oracle, found = exhaustive.solve(problem), label_program.solve(problem)
        assert found.proved
        assert same(oracle.value, found.value)
        if found.choice is not None:
            feasible += 1
            assert same(exhaustive.value(problem, found.choice), found.value)
            assert exhaustive.peak(problem, found.choice) <= problem.capacity + 1e-9
        beaten = label_program.solve(problem, cutoff=0.99 * oracle.value)
        assert beaten.choice is None
        assert oracle.choice is None or beaten.bound == pytest.approx(0.99 * oracle.value)
    assert feasible > 30, "the draw must not be all infeasible"


def test_prices_of_memory_bound_every_choice_that_fits():
    rng = random.Random(19)
    for _ in range(30):
        problem = random_problems.draw(rng, components=5, configs=4, most=400, tight=True)
        best = exhaustive.solve(problem).value
        arrays = dual.Arrays(problem)
        found = dual.Search(arrays)
        found.run(40)
        assert found.bound <= best * (1 + 1e-9)
        for _ in range(5):
            pivot = [rng.random() for _ in range(5)]
            memory_prices = np.array([rng.choice([0.0, 3 * rng.random()]) for _ in range(5)])
            assert found.shortest(np.array(pivot) / sum(pivot), memory_prices)[0] <= best * (1 + 1e-9)


def test_a_hurried_label_program_states_a_true_bound():
    rng = random.Random(41)
    for _ in range(8):
        problem = random_problems.draw(rng, components=12, configs=6)
        lean = memory.least_memory(problem)
        tight = replace(problem, capacity=1.15 * lean.value)
        best = label_program.solve(tight)
        assert best.proved
        assert best.choice is not None
        for limit in (0.0, 0.005, 0.02):
            found = label_program.solve(tight, time_limit_s=limit)
            assert found.bound <= best.value * (1 + 1e-9)
            assert found.choice is None or found.value >= best.value * (1 - 1e-9)
        assert label_program.solve(tight, gap=0.05).value <= best.value * 1.06


def test_no_choice_peaks_above_the_ceiling_or_below_the_floor():
    rng = random.Random(43)
    for _ in range(20):
        problem = random_problems.draw(rng, components=4, configs=3, most=90)
        peaks = [
            exhaustive.peak(problem, choice)
            for choice in product(*(range(len(c)) for c in problem.configs))
            if exhaustive.value(problem, choice) < float("inf")
        ]
        assert memory.memory_floor(problem) <= min(peaks) + 1e-12
        assert max(peaks) <= memory.memory_ceiling(problem) + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_where_labels_get_too_many_the_ilp_proves_a_single_stage(seed):
    rng, proved = random.Random(seed), 0
    for _ in range(15):
        problem = random_problems.draw(rng, components=5, configs=4, most=400, tight=True)
        oracle = exhaustive.solve(problem)
        single = Single(SimpleNamespace(budget=USUAL), 0.0, problem.width, 1, "ilp")
        single.stage = FormulatedStage(SimpleNamespace(problem=problem))
        single._by_ilp(30.0)
        assert single.bound <= oracle.value * (1 + 1e-9)
        assert single.value >= oracle.value * (1 - 1e-9)
        assert same(single.bound, oracle.value)
        if oracle.choice is not None and single.by_ilp:
            proved += 1
            assert exhaustive.peak(problem, single.solution.choice) <= problem.capacity
            assert search._solve_again(single, "ilp", float("inf"), is_close=False) == (
                single.solution,
                single.solution.solver,
            )
    assert proved > 5


def test_a_proved_stage_of_too_many_ways_is_not_solved_once_more():
    problem = random_problems.draw(random.Random(1), components=5, configs=4, most=400)
    single = Single(SimpleNamespace(budget=USUAL), 0.0, problem.width, 1, "ilp")
    single.stage = FormulatedStage(SimpleNamespace(problem=problem))
    single.solution = label_program.solve(problem)
    assert search._solve_again(single, "ilp", float("inf"), is_close=False)[1].endswith("checked by dp")
    single.stage = FormulatedStage(SimpleNamespace(problem=problem), ilp_ways=3)
    assert search._solve_again(single, "ilp", float("inf"), is_close=False) == (single.solution, single.solution.solver)


def test_brute_force_ends_in_time_and_proves_nothing_then(monkeypatch):
    problem = random_problems.draw(random.Random(7), components=5, configs=5)
    whole = exhaustive.solve(problem)
    monkeypatch.setattr(exhaustive, "_LOOK", 1)
    hurried = exhaustive.solve(problem, ends=0.0)
    assert whole.proved
    assert not hurried.proved
    assert hurried.value >= whole.value


def test_a_solver_that_was_stopped_before_it_found_anything_has_proved_nothing():
    problem = random_problems.draw(random.Random(7), components=12, configs=6)
    stopped = ilp.solve(problem, time_limit_s=1e-6)
    assert stopped.bound <= label_program.solve(problem).value * (1 + 1e-9)
    assert not Solution(choice=None, value=float("inf"), bound=7.0, solver="some").proved
    assert Solution(choice=None, value=float("inf"), bound=float("inf"), solver="some").proved


def test_a_solve_writes_nothing(capfd):
    assert ilp.solve(random_problems.draw(random.Random(3), components=4, configs=3)).proved
    assert capfd.readouterr() == ("", "")
