"""The joint search is held to brute force, which shares no code with it; and its bound to whatever can be found."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import joint_oracle
import numpy as np
import pytest
from floor_bounds import floors
from random_pipelines import RandomPipelines
from tables import some

from asa.cost.pipeline import StageTimes, makespan
from asa.planner.budget import Effort
from asa.planner.pipeline.explored import Explored
from asa.planner.pipeline.joint import search
from asa.planner.pipeline.staged import Skeleton, stage_times, value_of
from asa.planner.pipeline.thinning import Thinning
from asa.planner.stage.floor import LimitedStages, StageBounds
from asa.planner.stage.problem import Chain

INF = float("inf")


def small(seed: int, **changes: Any) -> RandomPipelines:
    """Brute force takes milliseconds."""
    rng = random.Random(seed)
    components, gpus = rng.choice([(2, 2), (3, 2), (3, 3), (2, 4), (2, 3), (4, 2), (4, 3), (4, 4)])
    drawn = {
        "components": components,
        "gpus": gpus,
        "most": rng.choice([2, 4, 8]),
        "speed": rng.choice([0.2, 0.01, 0.002]),
        "memory": rng.choice([50, 5, 1, 1.5, 2.5, 4, 3]),
        "strategies": 1 if components > 2 else rng.choice([1, 2]),
        "checkpoint": rng.random() < 0.5,
        "node": rng.choice([8, 2]),
        "sp": rng.choice([1, 1, 1.25]),
    }
    return RandomPipelines(seed, **{**drawn, **changes})


@cache
def truth_of(case: int, memory: float | None = None) -> float:
    """What brute force finds in ``small(case)``, worked out once for all tests that ask."""
    return joint_oracle.best(small(case) if memory is None else small(case, memory=memory))


@pytest.mark.parametrize("seed", some(range(2), [0]))
def test_the_search_finds_what_brute_force_finds(seed):
    impossible = 0
    for case in range(seed * 60, seed * 60 + 60):
        pipelines = small(case)
        pipelines.likely_tight = case % 2 == 1
        found, truth = search(pipelines), truth_of(case)
        impossible += truth == INF
        assert found.value == pytest.approx(truth, rel=1e-9), case
        assert found.bound == pytest.approx(truth, rel=1e-8), case
        if found.skeleton is not None:
            assert value_of(pipelines, found.skeleton, found.choices) == pytest.approx(found.value)
    assert impossible < 25, "the draw must not be all infeasible"


def test_few_labels_at_first_cost_neither_plan_nor_proof(monkeypatch):
    """Where memory binds and weights are given up at once, stages of a handful of labels are merged and explored again;
    and where they are not, hardly any."""
    refined = []
    refine = Explored.refine
    monkeypatch.setattr(Explored, "refine", lambda self, key: refined.append(key) or refine(self, key))
    counts = []
    for turns in (8, 1):
        effort = Effort(labels=2, turns=turns)
        for case in range(41, 81):
            memory = (1, 1.5, 2.5, 3)[case % 4]
            pipelines = small(case, memory=memory)
            pipelines.likely_tight = True
            found, truth = search(pipelines, effort=effort), truth_of(case, memory)
            assert found.value == pytest.approx(truth, rel=1e-9), case
            assert found.bound == pytest.approx(truth, rel=1e-8), case
        counts.append(len(refined))
    assert counts[1] - counts[0] > 3, "the draw must refine"


@pytest.mark.parametrize("explored", [False, True])
@pytest.mark.parametrize("stride", [0.3, 0.02])
def test_a_search_with_one_way_to_look_at_cuts_finds_the_same(explored, stride):
    """All stages in full, or cuts and widths one by one at weights; at once, or in many small steps."""
    small_steps = {"leap": 0.0, "leap_tight": 0.0, "wider": 1.5} if stride < 0.1 else {}
    effort = Effort(listed=0 if explored else 10**9, shared=10**9, stride=stride, **small_steps)
    for case in range(30):
        pipelines = small(case)
        found, truth = search(pipelines, effort=effort), truth_of(case)
        assert (found.value, found.bound) == pytest.approx((truth, truth), rel=1e-8), case


def test_stages_that_time_was_too_short_for_are_explored_later(monkeypatch):
    """What is known of the others by then is no plan yet."""
    explore, pieces = Explored.explore, []

    def one(self: Any, frame: Any, limit: float, ends: float, only: Any) -> bool:
        pieces.append(only is not None and len(only) > 1)
        return explore(self, frame, limit, ends, only and sorted(only)[:1])

    monkeypatch.setattr(Explored, "explore", one)
    for case in range(40):
        pipelines = small(case)
        found, truth = search(pipelines, effort=Effort(turns=1)), truth_of(case)
        assert (found.value, found.bound) == pytest.approx((truth, truth), rel=1e-8), case
    assert sum(pieces) > 10


def test_a_stage_that_others_wait_for_is_no_first_stage(monkeypatch):
    """A first stage is explored without what lengthens its last backward: elsewhere that would be noticed."""
    in_full = Effort(listed=0)
    pipelines = small(24, sp=1.25, memory=50, components=3, gpus=3, strategies=2, most=2)
    truth = joint_oracle.best(pipelines)
    assert search(pipelines, effort=in_full).value == pytest.approx(truth, rel=1e-9)
    monkeypatch.setattr(Thinning, "leading", property(lambda _: True, lambda *_: None), raising=False)
    assert search(pipelines, effort=in_full).value > truth * (1 + 1e-6)


class Picky(RandomPipelines):
    """A third of the plans that their chains say fit do not, as more is known of a whole plan than of its parts."""

    def fits(self, skeleton: Any, choices: Any) -> bool:
        said = (skeleton.starts, skeleton.widths, skeleton.num_microbatches, choices)
        return zlib.crc32(repr(said).encode()) % 3 > 0


@pytest.mark.parametrize("explored", [False, True])
def test_no_bound_is_above_a_plan_that_fits_where_others_are_refused(explored):
    effort = Effort(listed=0) if explored else Effort()  # all stages in full, or cuts and widths one by one
    refused = proved = 0
    for case in range(24):
        changes = {k: getattr(small(case), k) for k in ("gpus", "most", "speed", "memory", "checkpoint", "node", "sp")}
        parts = len(small(case).names)
        pipelines = Picky(case, components=parts, strategies=1 if parts > 2 else 2, **changes)
        found, truth = search(pipelines, effort=effort), joint_oracle.best(pipelines)
        assert found.bound <= truth * (1 + 1e-9), case
        assert found.value >= truth * (1 - 1e-9), case
        refused += found.bound < truth * (1 - 1e-9)
        proved += found.bound == pytest.approx(truth, rel=1e-9) and found.value < INF
    assert refused > 3, "the draw must refuse some of the best plans"
    assert proved > 3, "and leave others"


class Perturbed(RandomPipelines):
    """Another price of forward, wherever it is chosen: the search must notice."""

    def chain(self, width: int, m: int) -> Chain | None:
        chain = super().chain(width, m)
        if chain is None:
            return None
        rows = tuple(
            tuple(replace(c, forward=c.forward * 1.01, work=c.work + m * c.forward * 0.01) for c in row)
            for row in chain.configs
        )
        return replace(chain, configs=rows)


def test_a_perturbed_coefficient_breaks_the_agreement():
    right = RandomPipelines(5, components=3, gpus=2, most=4, speed=0.2, memory=50, strategies=1)
    wrong = Perturbed(5, components=3, gpus=2, most=4, speed=0.2, memory=50, strategies=1)
    assert search(right).value == pytest.approx(joint_oracle.best(right), rel=1e-9)
    assert search(wrong).value != pytest.approx(joint_oracle.best(right), rel=1e-6)
    assert search(right).value != pytest.approx(joint_oracle.best(wrong), rel=1e-6)


def random_plan(rng: random.Random, pipelines: RandomPipelines) -> tuple[Skeleton, list[tuple[int, ...]]] | None:
    """Any plan that fits, by the oracle's arithmetic."""
    n, m = len(pipelines.names), rng.choice(pipelines.microbatches())
    p = rng.randint(2, min(n, 4))
    widths = tuple(rng.choice(pipelines.widths()) for _ in range(p))
    offsets = [sum(widths[:s]) for s in range(p)]
    if sum(widths) > pipelines.gpus or not all(map(pipelines.placed, offsets, widths)):
        return None
    starts = (0, *sorted(rng.sample(range(1, n), p - 1)))
    return (
        Skeleton(starts=starts, widths=widths, num_microbatches=m, schedule="1f1b"),
        [
            tuple(rng.randrange(len(pipelines.chain(w, m).configs[i])) for i in range(a, b))  # type: ignore[union-attr]
            for w, a, b in zip(widths, starts, (*starts[1:], n), strict=True)
        ],
    )


def test_no_random_plan_is_below_the_bound():
    pipelines = RandomPipelines(3, components=8, gpus=4, most=8, speed=0.05, memory=50)
    found, rng = search(pipelines, time_limit_s=120), random.Random(0)
    assert found.value == pytest.approx(found.bound)
    tried = 0
    while tried < 300:
        plan = random_plan(rng, pipelines)
        if plan is not None:
            tried += 1
            assert value_of(pipelines, *plan) >= found.bound - 1e-9


def test_local_moves_do_not_improve_an_optimum():
    pipelines = RandomPipelines(7, components=8, gpus=4, most=8, speed=0.05, memory=1.2, names=("1f1b",))
    found, rng = search(pipelines, time_limit_s=120), random.Random(1)
    skeleton = found.skeleton
    assert skeleton is not None
    assert found.value == pytest.approx(found.bound)
    m, schedule = skeleton.num_microbatches, pipelines.schedules[skeleton.schedule]
    stops = (*skeleton.starts[1:], 8)
    for _ in range(400):
        s = rng.randrange(len(skeleton.widths))
        chain = pipelines.chain(skeleton.widths[s], m)
        a, b = skeleton.starts[s], stops[s]
        choices = [list(c) for c in found.choices]
        for _ in range(rng.randint(1, 2)):
            i = rng.randrange(a, b)
            choices[s][i - a] = rng.randrange(len(chain.configs[i]))
        row = replace_rows(chain, a, choices[s])
        flight = schedule.in_flight(s, len(skeleton.widths), m)
        if joint_oracle.stage(row, a, b, flight):
            assert value_of(pipelines, skeleton, [tuple(c) for c in choices]) >= found.value - 1e-9


def replace_rows(chain: Chain, start: int, choice: list[int]) -> Chain:
    """The chain with one configuration left where ``choice`` says so."""
    rows = list(chain.configs)
    for i, c in enumerate(choice, start):
        rows[i] = (chain.configs[i][c],)
    return replace(chain, configs=tuple(rows))


class Planted(RandomPipelines):
    """Every configuration but one per component costs a hundred times as much, and stages of 3 and 1 ranks are best."""

    def chain(self, width: int, m: int) -> Chain | None:
        chain = super().chain(width, m)
        if chain is None:
            return None
        rows = []
        for i, row in enumerate(chain.configs):
            good = (width == 3) == (i < 3) and width in (1, 3) and m == 4
            cheap = (i * 5) % len(row)
            rows.append(
                tuple(
                    replace(c, forward=1.0, backward=2.0, work=m * 3.0 + c.once + c.prompt + c.late)
                    if good and k == cheap
                    else replace(c, forward=300.0, backward=600.0, work=m * 900.0 + c.once + c.prompt + c.late)
                    for k, c in enumerate(row)
                )
            )
        return replace(chain, configs=tuple(rows))

    def compute(self, width: int, m: int) -> list[float]:
        return [3.0] * len(self.names)


def test_a_planted_plan_is_found():
    found = search(Planted(2, components=6, gpus=4, most=8, speed=5.0, memory=500, noise=0.1))
    assert found.skeleton is not None
    assert found.skeleton.starts == (0, 3)
    assert found.skeleton.widths == (3, 1)
    assert found.skeleton.num_microbatches == 4


def test_nothing_faster_than_the_incumbent_is_a_proof():
    pipelines = small(2, components=3, gpus=3, memory=50)
    best = search(pipelines).value
    beaten = search(pipelines, incumbent_ms=0.9 * best)
    assert beaten.skeleton is None
    assert beaten.bound == pytest.approx(0.9 * best)
    again = search(pipelines, incumbent_ms=1.1 * best)
    assert again.value == pytest.approx(best)


def test_a_search_without_time_states_a_true_bound():
    pipelines = RandomPipelines(11, components=10, gpus=6, most=8, speed=0.02, memory=2)
    best = search(pipelines, time_limit_s=120, gap=0.005)
    for limit in (0.0, 0.1, 0.3):
        found = search(pipelines, time_limit_s=limit)
        assert found.bound <= best.value * (1 + 1e-9)
        assert found.value >= best.bound * (1 - 1e-9)
    bounds = [b for _, _, b in best.curve]
    values = [v for _, v, _ in best.curve]
    assert bounds == sorted(bounds)
    assert values == sorted(values, reverse=True)


def test_scaling_all_times_scales_the_answer():
    class Scaled(RandomPipelines):
        def chain(self, width, m):
            chain = super().chain(width, m)

            def longer(x):
                names = ("forward", "backward", "once", "prompt", "late", "window", "bucket", "work", "cost")
                return replace(x, **{k: 3 * getattr(x, k) for k in names if hasattr(x, k)})

            return replace(
                chain,
                configs=tuple(tuple(map(longer, row)) for row in chain.configs),
                **{
                    k: tuple({ab: longer(e) for ab, e in edges.items()} for edges in getattr(chain, k))
                    for k in ("edges", "inlets", "outlets")
                },
            )

        def compute(self, width, m):
            return [3 * c for c in super().compute(width, m)]

        def transfer(self, *args):
            a, b = super().transfer(*args)
            return 3 * a, 3 * b

    given = {"components": 5, "gpus": 4, "most": 4, "speed": 0.02, "memory": 2}
    one, three = search(RandomPipelines(4, **given)), search(Scaled(4, **given))
    assert three.value == pytest.approx(3 * one.value)
    assert three.bound == pytest.approx(3 * one.bound)


def test_more_memory_is_never_slower():
    values = [
        search(RandomPipelines(6, components=5, gpus=4, most=8, speed=0.05, memory=memory)).value
        for memory in (0.6, 1.0, 1.5, 3, 50)
    ]
    assert values == sorted(values, reverse=True)


def test_the_times_of_a_stage_agree_with_the_oracle():
    pipelines = RandomPipelines(8, components=3, gpus=2, most=4, speed=0.01, memory=50, sp=1.3, strategies=2)
    chain = pipelines.chain(2, 4)
    for times, _, _, choice in joint_oracle.stage(chain, 0, 3, 2)[:200]:
        found = stage_times(chain.stage(0, 3, 2), choice)
        mine = (found.forward, found.backward, found.last_backward_extra, found.after)
        assert mine == pytest.approx(times, abs=1e-9)


def test_what_is_too_large_is_bounded_all_the_same():
    pipelines = RandomPipelines(1, components=120, gpus=8, most=2, speed=0.2, memory=50)
    found = search(pipelines, incumbent_ms=1e6)
    assert found.skeleton is None
    assert 0 < found.bound < 1e6


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("memory", [50, 2.5, 1.5, 1])
def test_quick_floors_are_below_every_plan(seed, memory):
    pipelines = small(seed, memory=memory)
    pipelines.likely_tight = memory < 50
    truth, found = joint_oracle.best(pipelines), floors(pipelines)
    if truth == INF:
        return
    assert 0 < min(found.values()) <= truth * (1 + 1e-9)
    assert floors(pipelines, 0.5 * min(found.values())) == dict.fromkeys(found, 0.5 * min(found.values()))
    closer = floors(pipelines, 1.3 * truth)  # halved towards a plan that is known
    assert min(closer.values()) <= truth * (1 + 1e-9)
    assert all(closer[m] >= min(found[m], 1.3 * truth) * (1 - 1e-9) for m in found)


def test_floors_know_that_a_stage_has_all_microbatches_to_do():
    class Even(RandomPipelines):
        handed = None

        def compute(self, width, m):
            return [1.0] * len(self.names)

        def limited(self, width, m, in_flight):
            if self.handed is None:
                return []
            begin, end = (np.array([row]) for row in self.handed)
            steady, whole = (StageBounds(k * np.arange(5.0)[None], begin, end, np.zeros(1)) for k in (1, m))
            return [LimitedStages(steady, whole)] * len(in_flight)

    found = floors(Even(1, components=4, gpus=2, most=8, speed=1.0, memory=50))
    # Two stages of one rank share four components, whatever the cut.
    assert found[8] == pytest.approx(16.0, rel=1e-3)
    assert found[1] == pytest.approx(4.0)
    # And before the second begins, or behind its end, a microbatch passes the first.
    closer = floors(Even(1, components=4, gpus=2, most=8, speed=1.0, memory=50), 20.0)
    assert closer[8] == pytest.approx(18.0, abs=4 / 2**5)
    assert closer[8] <= 18.0
    # A microbatch that is handed over costs either stage something there and back.
    Even.handed = [0.0, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.0]
    closer = floors(Even(1, components=4, gpus=2, most=8, speed=1.0, memory=50), 20.0)
    assert closer[8] == pytest.approx(18.9, abs=4 / 2**5)
    assert closer[8] <= 18.9


@pytest.mark.parametrize("seed", range(12))
def test_quick_floors_are_below_pipelines_of_many_stages(seed):
    """Any pipeline takes at least as long as the bound, also one whose slow stages are in front."""
    rng = np.random.default_rng(seed)
    stages, m = int(rng.integers(2, 9)), int(rng.integers(1, 40))
    pass_ms = rng.uniform(0.5, 2.0, stages) if seed % 2 else np.sort(rng.uniform(0.8, 1.2, stages))[::-1]

    class Given(RandomPipelines):
        def compute(self, width, m):
            return pass_ms.tolist() if width == 1 else [INF] * stages

        def microbatches(self):
            return (m,)

        def limited(self, width, m, in_flight):
            return []

    own = Given(seed, components=stages, gpus=stages, most=m, speed=1.0, memory=50)
    forward = rng.uniform(0.1, 0.9, stages) * pass_ms
    times = [StageTimes(forward=f, backward=t - f) for f, t in zip(forward, pass_ms, strict=True)]
    free = [(0.0, 0.0)] * (stages - 1)
    step_ms = min(makespan(times, free, s, m) for s in own.schedules.values() if not s.refusal(stages, m))
    assert floors(own, 2 * step_ms)[m] <= step_ms * (1 + 1e-9)


def test_floors_know_that_a_stage_waits_for_those_behind_it():
    class Slower(RandomPipelines):
        """Two stages of a component each; the first one takes a little longer."""

        def compute(self, width, m):
            return [2.0, 1.9]

        def limited(self, width, m, in_flight):
            return []

    found = floors(Slower(1, components=2, gpus=2, most=8, speed=1.0, memory=50), 20.0)
    # All eight microbatches in the first stage, and one in the second: it waits for the first and for the last one.
    assert found[8] == pytest.approx(17.9, abs=0.15)
    assert found[8] <= 17.9
