"""The clock of a pipeline: what it must come to, and that its lower bound is one."""

from __future__ import annotations

import random

import joint_oracle
import numpy as np
import pytest

from asa.cost.pipeline import StageTimes, lower_bound, makespan, makespans, program
from asa.schedules import schedules

SCHEDULES = schedules()


def draw(rng: random.Random) -> tuple[list[StageTimes], list[tuple[float, float]], str, int]:
    p, m = rng.randint(1, 8), rng.choice([1, 2, 3, 4, 5, 8, 13, 16])
    uneven, slow = rng.choice([0, 0.1, 1]), rng.choice([0, 0.1, 0.5, 3])
    stages = [
        StageTimes(
            forward=1 + uneven * rng.uniform(-1, 1),
            backward=2 + uneven * rng.uniform(-2, 1),
            last_backward_extra=rng.choice([0, rng.uniform(0, 1)]),
            after=rng.choice([0, rng.uniform(0, 8)]),
        )
        for _ in range(p)
    ]
    transfers = [(slow * rng.random(), slow * rng.random()) for _ in range(p - 1)]
    return stages, transfers, rng.choice(["1f1b", "gpipe"]), m


@pytest.mark.parametrize("seed", range(4))
def test_the_lower_bound_is_one_and_the_oracle_agrees(seed):
    rng, ratios = random.Random(seed), []
    for _ in range(600):
        stages, transfers, name, m = draw(rng)
        schedule = SCHEDULES[name]
        found, low = makespan(stages, transfers, schedule, m), lower_bound(stages, transfers, schedule, m)
        assert low <= found * (1 + 1e-12)
        ratios.append(found / low)
        times = [(s.forward, s.backward, s.last_backward_extra, s.after) for s in stages]
        orders = [schedule.order(s, len(stages), m) for s in range(len(stages))]
        assert joint_oracle.clock(times, transfers, orders, m) == pytest.approx(found, rel=1e-12)
        batch = makespans(
            np.array(times)[:, :, None], np.array(transfers).reshape(len(stages) - 1, 2, 1), schedule, m
        )  # fmt: skip
        assert batch[0] == pytest.approx(found, rel=1e-12)
    assert np.median(ratios) < 1.01


def test_equal_stages_take_what_the_textbook_says():
    for p, m in ((1, 4), (2, 4), (4, 8), (8, 16)):
        for name in ("1f1b", "gpipe"):
            stages = [StageTimes(forward=1.0, backward=2.0)] * p
            assert makespan(stages, [(0.0, 0.0)] * (p - 1), SCHEDULES[name], m) == pytest.approx(3.0 * (m + p - 1))


def test_a_case_without_closed_form():
    e = 1e-9
    stages = [StageTimes(forward=f, backward=b) for f, b in ((1, e), (e, 1), (e, e))]
    assert makespan(stages, [(0.0, 0.0)] * 2, SCHEDULES["1f1b"], 2) == pytest.approx(4.0)


def test_what_comes_once_per_step_is_waited_for():
    stages = [
        StageTimes(forward=1.0, backward=2.0, last_backward_extra=0.5, after=3.0),
        StageTimes(forward=1.0, backward=2.0, last_backward_extra=0.25),
    ]
    # forward 1, over 0.1, forward 1, backward 2.25, back 0.2, backward 2.5, after 3
    assert makespan(stages, [(0.1, 0.2)], SCHEDULES["1f1b"], 1) == pytest.approx(1 + 0.1 + 1 + 2.25 + 0.2 + 2.5 + 3)


def test_no_time_may_grow_and_the_step_shrink():
    rng = random.Random(9)
    for _ in range(200):
        stages, transfers, name, m = draw(rng)
        longer = [
            StageTimes(
                forward=s.forward + rng.random(), backward=s.backward + rng.random(),
                last_backward_extra=s.last_backward_extra, after=s.after + rng.random(),
            )
            for s in stages
        ]  # fmt: skip
        assert makespan(longer, transfers, SCHEDULES[name], m) >= makespan(stages, transfers, SCHEDULES[name], m)


def test_every_action_comes_after_what_it_waits_for():
    for name, schedule in SCHEDULES.items():
        m = 1 if name == "layers" else 6
        seen = set()
        for s, ahead, k, _ in program(schedule, 4, m):
            needed = (s - 1, True, k) if ahead else (s + 1, False, k)
            assert needed in seen or needed[0] in (-1, 4)
            seen.add((s, ahead, k))
        assert len(seen) == 4 * 2 * m
