"""Unequal devices: what they are, what uneven shards cost on them, and what the planner makes of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import fake_strategies
import nouns
import pytest

from asa.cost.machine import presets
from asa.cost.planned import price_plan, ways_of
from asa.errors import InfeasibleError, InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.layout import Layout, bounds
from asa.ir.plan import Plan, Stage
from asa.planner import Request, plan, verify
from asa.planner.pipeline.kinds import KindSpace, kinds, numbering, views, weights
from asa.planner.pipeline.practice import quickest
from asa.planner.pipeline.staged import Skeleton
from asa.planner.questions.explain import explain
from asa.planner.space import baselines
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space
from asa.report.snippets import uniform_choice
from asa.report.text import cluster as shown
from asa.report.text import tables
from asa.simulator import simulate
from asa.strategies import offered
from benchmarks import certificate

PLAIN = fake_strategies.PLAIN


def unequal(*speeds: float, memories: tuple[int, ...] = ()) -> Cluster:
    found = nouns.cluster(len(speeds))
    each = memories or (found.device.memory_bytes,) * len(speeds)
    return replace(
        found,
        devices=tuple(
            RankDevice(name=f"at {s}", speed=float(s), memory_bytes=m) for s, m in zip(speeds, each, strict=True)
        ),
    )


def everything(prices: Prices, most_stages: int) -> list[Candidate]:
    """Every plan of the stated space with one microbatch in a stage, and up to two in a pipeline, one by one."""
    space = prices.space
    gpus, n = space.request.gpus, len(space.profile.graph)
    found = []
    for view, among in views(prices):
        for width in among:
            for ways in itertools.product(*(list(view.space.ways(i, width, 1)) for i in range(n))):
                found.append(Candidate(origin="asa", widths=(width,), num_microbatches=1, ways=ways))
    own = kinds(space.cluster, gpus)
    for stages, m in itertools.product(range(2, most_stages + 1), [1, 2, 4, 8]):
        for sizes in itertools.product(range(1, gpus), repeat=stages):
            firsts = [0, *itertools.accumulate(sizes)]
            if firsts[-1] > gpus or any(len(set(own[a:b])) > 1 for a, b in itertools.pairwise(firsts)):
                continue
            for cuts in itertools.combinations(range(1, n), stages - 1):
                starts = (0, *cuts)
                width_of = [sizes[max(s for s, start in enumerate(starts) if start <= i)] for i in range(n)]
                for ways in itertools.product(*(list(space.ways(i, width_of[i], m)) for i in range(n))):
                    for name in space.schedules:
                        found.append(
                            Candidate(
                                origin="asa", widths=sizes, starts=starts, schedule=name, num_microbatches=m, ways=ways
                            )  # type: ignore[arg-type]
                        )
    return found


def few(strategies: Strategies, *data: str, schedules: tuple[str, ...] = ()) -> Strategies:
    return replace(
        strategies,
        data={k: v for k, v in strategies.data.items() if k in data},
        schedules={k: v for k, v in strategies.schedules.items() if k in schedules},
        checkpoint=False,
    )


@pytest.mark.parametrize("speeds", [(1, 0.5), (1, 0.25, 0.25), (0.5, 1, 1)])
def test_no_plan_is_faster_when_all_are_tried(speeds: tuple[float, ...]):
    strategies = few(offered(), "replicate", schedules=("1f1b",))
    cluster = unequal(*speeds)
    request = Request(gpus=len(speeds), global_batch=8, prefer_simple=False, time_limit_s=60)
    prices = Prices(Space(nouns.profile(), cluster, strategies, request))
    best = min(prices.of(c).cost.total_s for c in everything(prices, 2))
    found = plan(nouns.profile(), cluster, strategies, request)[0]
    assert found.prediction.step_time_s <= best * (1 + 1e-9)
    assert found.certificate.lower_bound_s <= best * (1 + 1e-9)
    assert found.certificate.gap <= 0.2  # over all weights that there could be, not only those that were tried
    assert "unequal" in found.certificate.space


def test_a_fast_device_gets_more_of_the_batch_and_verify_and_the_simulator_agree():
    cluster, strategies = unequal(1, 1, 0.4, 0.4), few(offered(), "replicate")
    request = Request(gpus=4, global_batch=32, prefer_simple=False)
    found = plan(nouns.profile(), cluster, strategies, request)[0]
    cut = found.stages[0].weights
    assert cut is not None
    assert cut[0] == cut[1] > cut[2] == cut[3]
    assert any(note.startswith("unequal devices: of a batch ranks 0 to 1 ") for note in found.notes)
    assert uniform_choice.name_of(found) is None
    assert verify(found, nouns.profile(), cluster, strategies) == found.prediction
    seconds = simulate(found, nouns.profile(), cluster, strategies).step_time_s
    assert seconds == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    even = replace(found, stages=(Stage(ranks=found.stages[0].ranks),))
    assert verify(even, nouns.profile(), cluster, strategies).step_time_s > found.prediction.step_time_s
    ddp = next(b for b in found.baselines if b.name == "ddp")
    assert ddp.step_time_s is not None
    assert found.prediction.step_time_s < 0.9 * ddp.step_time_s


def test_slow_devices_are_left_out_or_get_fewer_components():
    strategies = few(offered(), "replicate", schedules=("1f1b", "gpipe"))
    alone = plan(nouns.profile(), unequal(1, 0.02), strategies, Request(gpus=2, global_batch=8))[0]
    assert alone.num_ranks == 1
    profile, one = nouns.profile(), unequal(1, 0.3)
    request = Request(gpus=2, global_batch=8, strategies=("1f1b",))
    piped = plan(profile, one, strategies, request)[0]
    alike = plan(profile, unequal(1, 1), strategies, request)[0]
    assert piped.starts()[1] >= alike.starts()[1]
    front = price_plan(piped, profile, one, strategies)
    back = price_plan(replace(piped, stages=piped.stages[::-1]), profile, one, strategies)
    assert back.stages[0].cost.total_s > 2 * front.stages[0].cost.total_s


def step(speeds: tuple[float, ...], given: tuple[int, ...] | None) -> float:
    return verify(data_parallel(8, given), nouns.profile(), unequal(*speeds), offered()).step_time_s


def test_the_slowest_rank_decides():
    even, half = step((1, 1), None), step((1, 0.5), None)
    assert step((1, 0.5), (1, 1)) == half
    # Three quarters of the samples at full speed decide in both; the optimizer step is the slow device's.
    assert even < step((1, 1), (3, 1)) < step((1, 0.5), (3, 1)) < half
    assert step((0.5, 0.5), None) == pytest.approx(half)
    assert step((1, 0.25), (3, 1)) > step((1, 0.5), (3, 1))


def test_the_price_holds_for_every_microbatch():
    for batch, m, given in itertools.product((7, 9, 12), (1, 2, 4), ((3, 1), (2, 1), (5, 4))):
        layout = Layout(width=2, data=2, tensor=1, weights=given)
        sizes = [b - a for a, b in (bounds(batch, m, j) for j in range(m))]
        space = Space(nouns.profile(), unequal(1, 0.5), offered(), Request(gpus=2, global_batch=batch))
        rows = {speed: n for n, speed in Prices(space).pricer(2, m).shards.timed(layout)}
        for i, speed in enumerate((1.0, 0.5)):
            assert max(max(layout.sizes(size)[i] for size in sizes), 1) <= rows[speed]
        assert space.enough(0, layout, m) == (min(layout.fewest(size) for size in sizes) >= 1)


def test_a_faster_device_never_makes_the_best_plan_slower():
    rng = random.Random(5)
    strategies = few(offered(), "replicate", "zero1", schedules=("1f1b",))
    for _ in range(4):
        slow = rng.choice([0.3, 0.5, 0.7])
        before = None
        for speed in (slow, 1.1 * slow, 1.4 * slow):
            request = Request(gpus=3, global_batch=12, prefer_simple=False, time_limit_s=60)
            found = plan(nouns.profile(), unequal(1, speed, speed), strategies, request)[0]
            seconds = found.prediction.step_time_s
            assert before is None or seconds <= before * (1 + 0.005)
            before = seconds


def test_weights_are_few_and_do_not_depend_on_how_slow_the_slow_are():
    for batch in (4, 8, 64, 4096, 2**20):
        found = weights(unequal(1, 1, 0.5, 0.5), 4, batch)
        assert len(found) <= 25
        if batch <= 64 and batch // 2 <= 24:
            assert found == weights(unequal(1, 1, 0.3, 0.3), 4, batch)
    assert weights(unequal(1, 0.5, 0.25), 3, 64) == ((4, 2, 1),)
    assert weights(unequal(1, 0.5, 0.5), 1, 64) == ()
    assert weights(unequal(1, 0.5), 2, 1) == ()


def test_neighbours_that_compute_together_get_weights_as_a_group() -> None:
    """Seven samples for five pairs of ranks: two for each pair of fast ones. Of groups with a slow rank, it counts."""
    request = Request(gpus=10, global_batch=7)
    fast, slow, mixed = (1.0,) * 4, (0.6,) * 6, (1.0, 1.0, 1.0, 0.6)

    def cut(speeds: tuple[float, ...], inner: int) -> tuple[int, ...]:
        space = Space(nouns.profile(), unequal(*speeds), offered(), replace(request, gpus=len(speeds)))
        return quickest(Prices(space), len(speeds), inner)

    assert cut(fast + slow, 1) == (), "there is not a sample for each"
    assert cut(fast + slow, 2) == (2,) * 4 + (1,) * 6
    assert cut(mixed, 2)[:2] > cut(mixed, 2)[2:]
    assert len(set(cut(mixed, 2)[2:])) == 1
    assert cut(mixed, 4) == (), "one group is no choice"


def test_wide_stages_have_the_most_groups_that_leave_each_a_sample_by_weight() -> None:
    weights, batch = (8,) * 8 + (1,) * 16, 24
    request = Request(gpus=24, global_batch=batch)
    space = Space(nouns.profile(), unequal(*(1.0,) * 8, *(0.1,) * 16), offered(), request).weighted({24: weights})
    for tensor in (1, 2, 4):
        found = [x for x in space.whole_layouts(24, 1) if x.tensor == tensor]
        able = [
            x for d in range(1, 24 // tensor + 1) if 24 % (d * tensor) == 0
            for x in [Layout(width=24, data=d, tensor=tensor, weights=weights)] if x.fewest(batch) >= 1
        ]  # fmt: skip
        assert max(able, key=lambda x: x.data) in found


@pytest.mark.parametrize("longest", [{0: 4, 1: 4}, {0: 8, 1: 8}, {0: 1, 1: 1, 2: 2}, {0: 3, 1: 5, 2: 4}])
def test_numbers_of_stages_say_of_which_kind_they_are(longest: dict[int, int]):
    units = numbering(longest)
    found = [units[k] * w for k, most in longest.items() for w in range(1, most + 1)]
    assert len(set(found)) == len(found)
    assert min(units.values()) == 1


def test_stages_stand_on_devices_of_their_kind():
    strategies = few(offered(), "replicate", schedules=("1f1b",))
    request = Request(gpus=5, global_batch=8)
    space = KindSpace(Prices(Space(nouns.profile(), unequal(1, 1, 1, 0.5, 0.5), strategies, request)), lambda *_: True)
    assert space.widths() == (1, 2, 3, 4, 8)
    assert space.gpus == 11
    assert [o for o in range(space.gpus) if space.placed(o, 4)] == [3, 7]
    assert [o for o in range(space.gpus) if space.placed(o, 8)] == [3]
    assert [o for o in range(space.gpus) if space.placed(o, 2)] == [0, 1]
    assert space.compute(4, 1)[1] == pytest.approx(2 * space.compute(1, 1)[1])
    chains = [space.formulation(w, 2) for w in (3, 8)]
    choices = [(0,), (0, 0)]
    assert all(chains)
    made = space.candidate(Skeleton(starts=(0, 1), widths=(3, 8), num_microbatches=2, schedule="1f1b"), choices)
    assert made.widths == (3, 2)


def test_memory_is_that_of_each_stage_s_own_devices():
    strategies = few(offered(), "replicate", schedules=("1f1b",))
    profile = nouns.profile()
    request = Request(gpus=2, global_batch=8, strategies=("1f1b",))
    even = plan(profile, nouns.cluster(2), strategies, request)[0]
    first, second = even.prediction.memory_bytes_per_rank
    need = min(first, second) + 2**20

    def fits(*memories: int) -> bool:
        cluster = unequal(1, 1, memories=memories)
        prices = Prices(Space(profile, cluster, strategies, request))
        candidate = baselines.uniform("1f1b", prices, even.num_microbatches)
        return prices.of(candidate).peak.total <= prices.capacity(candidate)

    large = max(first, second) + 2**20
    assert fits(large, large)
    assert fits(*((need, large) if first < second else (large, need)))
    assert not fits(*((large, need) if first < second else (need, large)))


def test_a_plan_for_more_ranks_than_the_cluster_describes_is_refused():
    three = replace(unequal(1, 0.5), num_devices=2)
    base = nouns.plan()
    alone = tuple(replace(c, data=replace(c.data, degree=1), tensor=replace(c.tensor, strategy="none", degree=1))
                  for c in base.components)  # fmt: skip
    with pytest.raises(InvalidInputError, match="does not describe rank 2"):
        verify(
            replace(base, gpus=3, components=alone, stages=(Stage(ranks=(0, 1, 2)),)),
            nouns.profile(),
            three,
            offered(),
        )


def data_parallel(batch: int, given: tuple[int, ...] | None) -> Plan:
    base = nouns.plan()
    alike = tuple(
        replace(c, data=replace(c.data, degree=2), tensor=replace(c.tensor, strategy="none", degree=1))
        for c in base.components
    )
    return replace(base, components=alike, stages=(Stage(ranks=(0, 1), weights=given),), global_batch=batch)


def test_memory_is_that_of_each_rank_s_own_shard():
    def held(batch: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
        made = data_parallel(batch, given)
        return verify(made, nouns.profile(), nouns.cluster(2), offered()).memory_bytes_per_rank

    assert held(16, (3, 1)) == (held(24, None)[0], held(8, None)[0])
    assert held(16, (1, 1)) == held(16, None)


def test_a_small_memory_takes_the_small_shard():
    profile, strategies = nouns.profile(), few(offered(), "replicate")
    state = verify(data_parallel(2, None), profile, nouns.cluster(2), strategies).memory_bytes_per_rank[0]
    large, small = (
        max(verify(data_parallel(n, None), profile, nouns.cluster(2), strategies).memory_bytes_per_rank) + 2**14
        for n in (24, 8)
    )
    assert large > small > state
    cluster = unequal(1, 0.33, memories=(large, small))
    prices = Prices(Space(profile, cluster, strategies, Request(gpus=2, global_batch=16)))

    def fits(cut: tuple[int, ...] | None) -> bool:
        made = data_parallel(16, cut)
        whole = Candidate(origin="x", widths=(2,), num_microbatches=1, ways=ways_of(made, profile, strategies))
        return prices.of(whole).peak.total <= prices.capacity(whole)

    assert fits((3, 1))
    assert not fits(None)
    assert not fits((1, 3))


@pytest.mark.parametrize("speeds", [(1, 0.5, 0.5), (1, 1, 0.2, 0.2)])
def test_no_plan_beside_the_answer_breaks_its_certificate(speeds: tuple[float, ...]):
    strategies, cluster = offered(), unequal(*speeds)
    request = Request(gpus=len(speeds), global_batch=16, prefer_simple=False)
    found = plan(nouns.profile(), cluster, strategies, request)[0]
    trial = certificate.check(found, nouns.profile(), cluster, strategies, tries=300)
    assert not trial.refuted
    assert trial.floor_s <= trial.lower_bound_s * (1 + 1e-9)


def test_every_component_of_an_uneven_plan_is_explained():
    cluster, strategies = unequal(1, 0.4, 0.4), few(offered(), "replicate", "zero1")
    found = plan(nouns.profile(), cluster, strategies, Request(gpus=3, global_batch=32, prefer_simple=False))[0]
    assert found.stages[0].weights
    told = explain(found, nouns.profile(), cluster, strategies)
    assert [c.name for c in told.components] == [c.name for c in found.components]
    assert any(c.samples_per_rank > 32 / 3 for c in told.components)


def test_equal_shares_can_be_asked_for():
    request = Request(gpus=2, global_batch=32, uneven=False, prefer_simple=False)
    found = plan(nouns.profile(), unequal(1, 0.8), few(offered(), "replicate"), request)[0]
    assert found.stages[0].weights is None
    assert "weights" not in found.certificate.space


def test_a_large_device_may_hold_what_a_small_one_cannot():
    profile = nouns.profile()
    strategies = few(offered(), "replicate", schedules=("1f1b",))
    head = 2 * profile.graph.components[-1].parameter_bytes
    cluster = unequal(1, 0.99, memories=(head // 4, 16 * head))
    request = Request(gpus=2, global_batch=8, prefer_simple=False)
    found = plan(profile, cluster, strategies, request)[0]
    assert found.starts() == (0, 2)
    first, second = found.prediction.memory_bytes_per_rank
    assert first <= head // 4 < second


def test_no_memory_on_the_first_devices_is_no_plan():
    cluster = unequal(1, 0.99, 0.99, memories=(1, 2**34, 2**34))
    with pytest.raises(InfeasibleError, match=r"devices have 1 B"):
        plan(nouns.profile(), cluster, offered(), Request(gpus=3, global_batch=8))


def test_of_equally_fast_devices_one_without_memory_comes_last() -> None:
    cluster = unequal(1, 1, 1, memories=(1, 2**34, 2**34))
    found = plan(nouns.profile(), cluster, offered(), Request(gpus=3, global_batch=8))[0]
    assert found.devices == (1, 2, 0)
    assert found.num_ranks <= 2


def test_a_fast_device_behind_a_slow_one_comes_first():
    strategies = few(offered(), "replicate")
    found = plan(nouns.profile(), unequal(1, 0.1, 2), strategies, Request(gpus=2, global_batch=8))[0]
    alone = plan(nouns.profile(), unequal(2, 1, 0.1), strategies, Request(gpus=2, global_batch=8))[0]
    assert found.devices == (2, 0, 1)
    assert found.prediction.step_time_s == pytest.approx(alone.prediction.step_time_s)
    assert any("the ranks run on devices 2" in note for note in found.notes)


def test_presets_of_unequal_devices_say_that_speeds_are_estimates():
    found = {n: presets.load(n) for n in presets.names() if presets.load(n).unequal}
    assert {"a100-4-v100-4-100g-rdma", "a100-8-v100-8-100g-rdma", "4090-2-3090-2-pcie"} <= set(found)
    for cluster in found.values():
        speeds = [cluster.speed(r) for r in range(cluster.num_devices)]
        assert speeds == sorted(speeds, reverse=True)
        assert speeds[0] == 1.0
        assert cluster.status == "estimated"
        assert "speeds estimated" in cluster.source


def test_a_cluster_shows_which_ranks_have_which_device():
    cluster = unequal(1, 1, 0.5, 1)
    told = shown.unequal(cluster)
    memory = cluster.device.memory_bytes
    assert told == {("at 1", 1.0, memory): "0 to 1, 3", ("at 0.5", 0.5, memory): "2"}
    assert shown.unequal(nouns.cluster(2)) == {}
    listed = tables.plain([shown.overview([("preset", presets.load("a100-4-v100-4-100g-rdma"))])], width=120)
    assert "4 x A100 + 4 x V100" in listed
    assert "15.7 GiB" in listed, "the least of its devices, not that of the first"
    assert len(shown.render(cluster)) == len(shown.render(nouns.cluster(4))) + 2
