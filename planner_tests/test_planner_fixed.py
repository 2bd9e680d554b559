"""What is said of plans whose cuts and widths are fixed is held to all of them, one by one."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import joint_oracle
import numpy as np
import pytest
from random_pipelines import RandomPipelines

from asa.cost.pipeline import StageTimes, makespan
from asa.planner.pipeline import column_generation
from asa.planner.pipeline.column_generation import ColumnGeneration, game, longest
from asa.planner.pipeline.open_list import OpenList
from asa.planner.pipeline.stage_cache import StageCache
from asa.planner.pipeline.stages import Explorer
from asa.planner.space.space import divisors
from asa.planner.stage import pricing_problem
from asa.planner.stage.lattice import Numbers
from asa.planner.stage.pricing_problem import PricingProblem
from asa.schedules import schedules

INF = float("inf")


def pipelines(seed: int) -> RandomPipelines:
    return RandomPipelines(
        seed, components=4, gpus=4, most=4, speed=(0.05, 0.01)[seed % 2], memory=(50, 2.5, 1.5)[seed % 3], strategies=1,
        sp=(1.0, 1.25)[seed // 2 % 2], checkpoint=seed % 4 > 0,
    )  # fmt: skip


def stages() -> list[tuple[float, float, float]]:
    """Of stages at drawn weights: the least value there is, what prices of memory say, and what labels say."""
    rng, found = random.Random(0), []
    for seed in range(24):
        x, flight, n = pipelines(seed), rng.choice([1, 2, 3]), rng.choice([1, 3, 4])
        chain = x.chain(2, 4)
        assert chain is not None
        start = rng.randrange(5 - n)
        ways = joint_oracle.stage(chain, start, start + n, flight)
        piece = Explorer(Numbers(chain), flight).slice(start, start + n)
        for _ in range(6):
            f, b, longer, once = rng.uniform(0, 4), rng.uniform(0, 4), rng.choice([0, 2]), rng.choice([0, 0.3, 1])
            behind = np.array([rng.uniform(0, 2) for _ in divisors(2)])
            entry = np.array([rng.uniform(0, 2) for _ in divisors(2)])
            degrees = [layout.data for layout in chain.layouts]

            def at(x: Any) -> int:
                return divisors(2).index(x.data)

            values = [
                f * t[0] + b * t[1] + longer * t[2] + once * (t[2] + t[3]) + entry[at(first)] + behind[at(last)]
                for t, first, last, _ in ways
            ]
            assert set(degrees) == set(divisors(2))
            stage = PricingProblem(piece, (f, b, longer, once), behind)
            priced = stage.entry_bounds() + entry
            best = stage.best(entry, INF, 10_000, INF)
            ended = best.values + behind
            k = int(ended.argmin())
            truth = min(values, default=INF)
            if truth < INF:
                value = next(v for v, w in zip(values, ways, strict=True) if w[3] == best.choices[k])
                assert value == pytest.approx(ended[k], rel=1e-9), "the choice takes what it is said to take"
            few = stage.best(entry, INF, 3, INF)
            assert min(few.proved, float((few.values + behind).min())) <= truth + 1e-9, "what was dropped is known"
            pivot, memory = (np.array([rng.choice([0, 0.3, 1]) + 1e-3 for _ in range(n)]) for _ in range(2))
            told = PricingProblem(piece, (f, b, longer, once), behind, (pivot / pivot.sum(), piece.tight * memory))
            assert float((told.entry_bounds() + entry).min()) <= truth + 1e-9, "any weights bound"
            at_last = told.best(entry, truth * (1 + 1e-6), 10_000, INF).values + behind
            assert float(at_last.min()) == pytest.approx(truth, rel=1e-9), "and let the best way through"
            found.append((truth, float(priced.min()), float(ended.min())))
    return found


def test_a_stage_at_weights_takes_what_its_best_way_takes():
    found = stages()
    possible = [x for x in found if x[0] < INF]
    assert 20 < len(possible) < len(found), "the draw must have both"
    for truth, priced, best in found:
        assert best == pytest.approx(truth, rel=1e-9)
        assert priced <= truth + 1e-9
    assert np.median([priced / truth for truth, priced, _ in possible]) > 0.97, "prices say nearly as much"
    assert min(priced / truth for truth, priced, _ in possible) < 0.999, "and not all"


@pytest.mark.parametrize("wrong", [("_CLOSE", 0.7), ("_NEVER", 0.1)])
def test_a_wrong_limit_or_clock_would_be_noticed(wrong, monkeypatch):
    monkeypatch.setattr(pricing_problem, *wrong)
    with pytest.raises((AssertionError, StopIteration)):
        test_a_stage_at_weights_takes_what_its_best_way_takes()


def known(
    x: RandomPipelines, m: int, name: str, widths: tuple[int, ...], at: tuple[int, ...]
) -> tuple[float, ColumnGeneration]:
    """The fastest plan of such cuts and widths, and what is said of them."""
    p, schedule = len(widths), x.schedules[name]
    case = OpenList(StageCache(x), m, name, schedule, [p], lambda *_: True)
    for _ in range(3):
        case.step(INF, INF)
    flights = [schedule.in_flight(s, p, m) for s in range(p)]
    options = [joint_oracle.stage(x.chain(w, m), at[s], at[s + 1], flights[s]) for s, w in enumerate(widths)]
    truth, offsets = INF, [sum(widths[:s]) for s in range(p)]
    for picked in product(*options):
        moves = [x.transfer(at[s], m, picked[s - 1][2], picked[s][1], offsets[s]) for s in range(1, p)]  # type: ignore[arg-type]
        times = [w[0] for w in picked]
        truth = min(truth, joint_oracle.clock(times, moves, [schedule.order(s, p, m) for s in range(p)], m))
    cuts = tuple((w, at[s], at[s + 1]) for s, w in enumerate(widths))
    return truth, ColumnGeneration(case, cuts, 0.0, [np.ones(4 * p + 2 * (p - 1))])


def several() -> list[tuple[float, float, float]]:
    rng, found = random.Random(1), []
    for seed in range(12):
        x = pipelines(seed)
        for m, name in ((1, "1f1b"), (4, "1f1b"), (4, "gpipe")):
            p = rng.choice([2, 2, 3])
            at = (0, *rng.choice(list(combinations(range(1, 4), p - 1))), 4)
            widths = rng.choice([w for w in product((1, 2), repeat=p) if sum(w) <= 4])
            truth, some = known(x, m, name, widths, at)
            for _ in range(20):
                if some.done or some.bound >= truth * (1 + 1e-9):
                    break
                some.step(INF, INF)
                assert some.bound <= truth * (1 + 1e-9), (seed, m, name, widths, at)
            found.append((truth, some.bound, some.value))
    return found


def test_fixed_cuts_take_at_least_what_is_said_of_them():
    found = several()
    for truth, bound, value in found:
        assert bound <= truth * (1 + 1e-9)
        assert value >= truth * (1 - 1e-9)
        assert (truth == INF) == (value == INF)
    possible = [x for x in found if x[0] < INF]
    assert 20 < len(possible) < len(found)
    assert np.median([value / truth for truth, _, value in possible]) < 1 + 1e-9, "most often the best plan comes up"
    assert np.median([bound / truth for truth, bound, _ in possible]) > 0.995


def test_a_path_that_counts_too_much_would_be_noticed(monkeypatch):
    monkeypatch.setattr(column_generation, "longest", lambda *args: (longest(*args)[0], 1.05 * longest(*args)[1]))
    with pytest.raises(AssertionError):
        several()


class Turns:
    """In place of column generation: a plan of so many ms in each step."""

    def __init__(self, values: list[float]) -> None:
        self.left, self.value, self.bound, self.choices = values, INF, 5.0, INF

    @property
    def done(self) -> bool:
        return not self.left

    def step(self, _limit: float, _ends: float) -> None:
        self.choices = self.left.pop(0)
        self.value = min(self.value, self.choices)


@pytest.mark.parametrize(
    ("values", "told", "left"),
    [
        ([10.5, 9.0, 9.5, 8.0], [9.0], 1),  # near the best plan, better, no better: the rest has to wait
        ([12.0, 9.0], [], 1),  # far from it
        ([9.0, 8.0], [9.0, 8.0], 0),
        ([10.5, 10.2], [], 0),
    ],
)
def test_a_plan_near_the_best_one_is_improved_at_once(values, told, left, monkeypatch):
    case = OpenList(StageCache(pipelines(0)), 1, "1f1b", schedules()["1f1b"], [2], lambda *_: True)
    said, cuts, turns, some = [], ((2, 0, 2), (2, 2, 4)), Turns(values), case
    monkeypatch.setattr(case, "propose", lambda _starts, _widths, ms: (said.append(ms) or ms, True))
    some._leaves[cuts], some._columns_of[cuts], some._listed = (None, None, False), turns, 100.0
    assert some._examine(5.0, cuts, 10.0, INF) == (5.0, min(told, default=INF))
    assert (said, len(turns.left)) == (told, left)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_longest_path_takes_what_the_clock_says_and_bounds_all_others(name):
    rng, schedule = np.random.default_rng(3), schedules()[name]
    for _ in range(60):
        p, m = int(rng.integers(2, 6)), int(rng.choice([1, 2, 4, 8]))
        if schedule.refusal(p, m):
            continue

        def step(x: Any, p: int = p, m: int = m) -> float:
            times = [
                StageTimes(forward=a, backward=b, last_backward_extra=c, after=d)
                for a, b, c, d in x[: 4 * p].reshape(p, 4).tolist()
            ]
            moves = [(a, b) for a, b in x[4 * p :].reshape(p - 1, 2).tolist()]
            return makespan(times, moves, schedule, m)

        x, other = rng.random((2, 6 * p - 2))
        value, counts = longest(x, schedule, p, m)
        assert value == pytest.approx(step(x), rel=1e-12)
        assert counts @ x == pytest.approx(value, rel=1e-12)
        assert counts @ other <= step(other) * (1 + 1e-12)


def test_the_value_of_a_game_is_the_same_from_both_sides():
    rows, columns, value = game(np.array([[2.0, 1.0, 3.0], [3.0, 2.0, 1.0], [1.0, 3.0, 2.0]]))
    assert (value, *rows, *columns) == pytest.approx((2, *[1 / 3] * 6)), "rock, paper, scissors"
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.random((int(rng.integers(1, 9)), int(rng.integers(1, 9)))) + 1e-3
        if rng.random() < 0.3:  # ties
            values = np.round(values, 1) + 0.1
        rows, columns, value = game(values)
        assert (rows.sum(), columns.sum()) == pytest.approx((1, 1))
        assert min(*rows, *columns) >= 0
        assert (rows @ values).min() == pytest.approx(value, rel=1e-7)
        assert (values @ columns).max() == pytest.approx(value, rel=1e-7)
