"""How unequal devices cut a batch: searched, and inside the bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import known_models
import pytest
from tables import some

from asa.cost.machine import presets
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.layout import Layout, lowest_terms
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, explain, plan, verify
from asa.planner.pipeline.kinds import views, weights
from asa.planner.pipeline.practice import quickest
from asa.planner.space.baselines import uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import MS
from asa.planner.stage.shares import DividedBounds
from asa.planner.stage.singles import first_plan, singles
from asa.strategies import offered

PROFILE = Path(__file__).parent.parent / "profiles" / "resnet50.cpu.fp32.json"
PROFILES = [known_models.profile(g, 300.0, 64) for g in (known_models.transformer(4, 512), known_models.vgg16())]


def unlike(*speeds: float) -> Cluster:
    known = presets.load("a100-nvlink-8")
    every = (*speeds, *(speeds[-1],) * (8 - len(speeds)))
    return replace(known, devices=tuple(RankDevice(name=f"at {s:g}", speed=s) for s in every))


def reweighted(candidate: Candidate, weights: tuple[int, ...]) -> Candidate:
    cut = lowest_terms(weights)
    ways = tuple(replace(w, layout=replace(w.layout, weights=cut)) for w in candidate.ways)
    return replace(candidate, ways=ways)


def free_bound(prices: Prices, steps: int = 400) -> float:
    """Seconds below which no division of the batch is, as far as so many steps raise it."""
    queue = list(DividedBounds(prices, anything).divisions())
    for _ in range(steps):
        lowest = min(queue, key=lambda x: x.bound)
        if lowest.stuck:
            break
        lowest.step(float("inf"), float("inf"))
    return min(x.bound for x in queue) / MS


EQUAL_PAIRS, ALL_DIFFERENT = (1.0, 1.0, 0.5, 0.5), (1.0, 0.7, 0.4)


@pytest.mark.parametrize(
    ("speeds", "number"), some(product([EQUAL_PAIRS, ALL_DIFFERENT], (0, 1)), [(EQUAL_PAIRS, 1), (ALL_DIFFERENT, 0)])
)
def test_no_weights_beat_the_bound_and_hardly_any_the_answer(number, speeds) -> None:
    profile, cluster, count = PROFILES[number], unlike(*speeds), len(speeds)
    asked = Request(gpus=count, global_batch=120, prefer_simple=False, time_limit_s=0.5)
    found = plan(profile, cluster, offered(), asked)[0]
    verified = verify(found, profile, cluster, offered()).step_time_s
    assert verified == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    assert found.certificate.lower_bound_s <= verified
    prices, rng, best = Prices(Space(profile, cluster, offered(), asked)), random.Random(0), float("inf")
    bound = free_bound(prices)
    for name in ("ddp", "tensor", *(["hybrid:d2t2"] if count == 4 else [])):
        for m in (1, 2):
            whole = uniform(name, prices, m)
            for _ in range(12):
                weights = tuple(max(1, round(100 * s * rng.uniform(0.8, 1.25))) for s in speeds)
                if count == 4 and rng.random() < 0.7:  # alike where devices are
                    weights = (weights[0], weights[0], weights[2], weights[2])
                taken = prices.of(reweighted(whole, weights)).cost.total_s
                assert bound <= taken * (1 + 1e-9)
                best = min(best, taken)
    assert found.certificate.lower_bound_s <= best * (1 + 1e-9)
    assert found.prediction.step_time_s <= best * 1.002


@pytest.mark.parametrize("rooms", [None, (16, 16, 5, 5)], ids=["alike", "by device"])
def test_no_division_that_fits_beats_the_bound_with_memory(rooms) -> None:
    profile, cluster, rng = PROFILES[1], unlike(*EQUAL_PAIRS), random.Random(0)
    asked = Request(gpus=4, global_batch=512, prefer_simple=False)
    open_space = Prices(Space(profile, cluster, offered(), asked))
    drawn = []
    for _ in range(80):
        whole = uniform(
            rng.choice(("ddp", "zero1", "zero2", "fsdp", "tensor", "hybrid:d2t2")), open_space, rng.choice((1, 2))
        )
        ways = tuple(replace(w, checkpoint=rng.random() < 0.3) for w in whole.ways)
        first = rng.randrange(1, 20)
        weights = (first, first, rng.randrange(1, first + 1), 0)
        drawn.append(reweighted(replace(whole, ways=ways), (*weights[:3], weights[2])))
    peaks = sorted(open_space.of(c).peak.total for c in drawn)
    bounds = []
    for share in (0.05, 0.2, 0.5):
        limit = peaks[int(share * len(peaks))] / peaks[-1]
        if rooms is None:
            used, request = cluster, replace(asked, memory_bytes=int(limit * peaks[-1] * 1.1) + (2 << 30))
        else:
            devices = tuple(
                replace(d, memory_bytes=int(limit * peaks[-1] * 1.1 * room / 8) + (2 << 30))
                for d, room in zip(cluster.devices, (*rooms, *(8,) * 4), strict=True)
            )
            used, request = replace(cluster, devices=devices), asked
        prices = Prices(Space(profile, used, offered(), request))
        bounds.append(free_bound(prices))
        times = [prices.of(c).cost.total_s for c in drawn if prices.fits(c)]
        assert times
        assert bounds[-1] <= min(times) * (1 + 1e-9)
    assert bounds[0] > bounds[-1] * 1.001, "memory raises it"
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("speeds", [(1.0, 0.7, 0.7), (1.0, 1.0, 0.7)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("cluster", "number"),
    some(product(["t4-pcie-4", "a100-nvlink-8"], (0, 1)), [("t4-pcie-4", 0), ("a100-nvlink-8", 1)]),
)
def test_no_components_in_layouts_of_their_own_beat_the_bound(number, cluster, speeds) -> None:
    """Over slow links what is sent between layouts decides, and it is in the bound."""
    profile, rng, links = PROFILES[number], random.Random(1), presets.load(cluster)
    every = (*speeds, *[0.7] * (links.num_devices - 3))
    links = replace(links, devices=tuple(RankDevice(name=f"at {s:g}", speed=s) for s in every))
    prices = Prices(Space(profile, links, offered(), Request(gpus=4, global_batch=96)))
    bound, n = free_bound(prices), len(profile.graph)
    assert 0 < free_bound(prices, 0) <= bound, "without time it is one of compute alone"
    best = float("inf")
    for width in (2, 3, 4):
        for _ in range(3):
            cut = lowest_terms(tuple(max(1, round(100 * s * rng.uniform(0.8, 1.25))) for s in every[:width]))
            view, m = Prices(prices.space.weighted({width: cut}), prices), rng.choice((1, 2))
            able = [list(view.space.ways(i, width, m, anything)) for i in range(n)]
            x = Candidate(origin="", widths=(width,), num_microbatches=m, ways=tuple(map(rng.choice, able)))
            for i in range(n):  # better one by one
                some = [x.with_way(i, way) for way in rng.sample(able[i], min(8, len(able[i])))]
                x = min([x, *some], key=lambda y: view.of(y).cost.total_s)
            best = min(best, view.of(x).cost.total_s)
    assert bound <= best <= 2 * bound


def test_where_batches_are_cut_evenly_nothing_is_added_to_the_bound() -> None:
    even = Request(gpus=4, global_batch=64, uneven=False)
    for cluster, asked in (
        (unlike(1.0, 1.0, 0.5, 0.5), even),
        (presets.load("a100-nvlink-8"), replace(even, uneven=True)),
    ):
        assert not DividedBounds(Prices(Space(PROFILES[0], cluster, offered(), asked)), anything).divisions()


def test_a_cut_in_proportion_to_speed_of_work_without_a_floor_is_the_bound() -> None:
    """Compute alone, linear in samples: shares in proportion to speed are best, and the bound says just that."""
    profile, cluster = PROFILES[1], unlike(1.0, 1.0, 0.5, 0.5)
    prices = Prices(Space(profile, cluster, offered(), Request(gpus=4, global_batch=240)))
    bound = free_bound(prices)
    one = reweighted(uniform("ddp", prices, 1), (2, 2, 1, 1))
    assert isinstance(one.ways[0].layout, Layout)
    compute = prices.of(one).cost.compute_s
    assert 0.8 * compute <= bound <= prices.of(one).cost.total_s


def listed(*speeds: float) -> Cluster:
    known = presets.load("a100-nvlink-8")
    level = replace(known.levels[0], devices=len(speeds))
    every = tuple(RankDevice(name=f"at {s:g}", speed=s) for s in speeds)
    return replace(known, num_devices=len(speeds), levels=(level,), devices=every)


@pytest.mark.parametrize("speeds", [(0.1, 0.1, 1.0, 1.0), (0.5, 1.0, 0.5, 1.0)])
def test_devices_may_be_listed_in_any_order(speeds: tuple[float, ...]) -> None:
    profile = PROFILES[1]
    asked = Request(gpus=4, global_batch=120, prefer_simple=False, time_limit_s=0.5)
    cluster, best = listed(*speeds), listed(*sorted(speeds, reverse=True))
    found, other = (plan(profile, c, offered(), asked)[0] for c in (cluster, best))
    assert found.prediction.step_time_s == pytest.approx(other.prediction.step_time_s, rel=0.01)
    assert found.devices is not None
    assert [speeds[d] for d in found.devices] == sorted(speeds, reverse=True)
    assert other.devices is None
    assert found.cluster_fingerprint == codec.fingerprint(cluster)
    assert any("CUDA_VISIBLE_DEVICES=" in note for note in found.notes)
    again = verify(found, profile, cluster, offered())
    assert again.step_time_s == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    assert explain(found, profile, cluster, offered()).components
    assert codec.loads(Plan, codec.dumps(found), source="itself").devices == found.devices
    with pytest.raises(InvalidInputError, match="devices"):
        verify(replace(found, devices=(0, 0, 1, 2)), profile, cluster, offered())


def many(gpus: int, fast: int, slow: RankDevice, **asked: int) -> Prices:
    devices = tuple(RankDevice(name="x", speed=1.0) if rank < fast else slow for rank in range(32))
    mixed = replace(presets.load("h100-4x8-ib"), devices=devices)
    return Prices(Space(PROFILES[0], mixed, offered(), Request(gpus=gpus, **asked)))


def test_stages_of_the_first_devices_of_a_kind_and_of_a_divisor_of_the_batch_are_searched() -> None:
    for other in (RankDevice(name="slow", speed=0.2), RankDevice(name="small", speed=1.0, memory_bytes=2**30)):
        space = many(26, 19, other, global_batch=66).space
        assert space.single_widths() == (26, 24, 22, 19, 17, *range(16, 0, -1))
        assert "of its half, third or quarter rounded up, or of 26, or of the first ranks up to" in space.describe()


def test_every_width_up_to_16_and_small_multiples_and_parts_of_the_batch_are_searched() -> None:
    slow = RankDevice(name="slow", speed=0.2)
    for batch in (8, 17, 35, 512):
        assert many(17, 32, slow, global_batch=batch).space.single_widths() == tuple(range(17, 0, -1))
    assert many(32, 32, slow, global_batch=57).space.single_widths() == (32, 29, 24, 19, *range(16, 0, -1))
    found = many(32, 32, slow, global_batch=5).space
    assert found.single_widths() == (32, 24, 20, *range(16, 0, -1))
    assert "one stage of 1 to 16 ranks, of a multiple of 8 ranks, of a power of two times the batch" in found.describe()
    assert 22 in many(32, 32, slow, global_batch=22).space.single_widths()


def test_one_sample_for_each_slow_device_is_tried() -> None:
    """Of 27 samples 5 fast devices have 16, which no whole number for each of them leaves to the others."""
    cluster = listed(*[1.0] * 5, *[0.4] * 11)
    assert (16,) * 5 + (5,) * 11 in weights(cluster, 16, 27)


@pytest.mark.parametrize(
    ("speeds", "batch"), [((1.0,) * 3 + (0.4,) * 5, 27), ((1.0, 0.7, 0.7, 0.4), 18), ((1.0, 1.0, 0.1), 256)]
)
def test_no_whole_numbers_of_samples_are_computed_sooner_than_the_quickest(speeds, batch) -> None:
    profile, cluster, width = PROFILES[1], listed(*speeds), len(speeds)
    prices = Prices(Space(profile, cluster, offered(), Request(gpus=width, global_batch=batch)))
    seconds = [float(prices.compute_on(k, 1).sum()) if k else 0.0 for k in range(batch + 1)]

    def taken(rows: Sequence[int]) -> float:
        return max(seconds[k] / s for k, s in zip(rows, speeds, strict=True))

    cut = quickest(prices, width)
    rows = Layout(width=width, data=width, tensor=1, weights=cut).sizes(batch)
    assert min(rows) >= 1
    kinds = sorted(set(speeds), reverse=True)
    for own in itertools.product(range(1, batch), repeat=len(kinds)):
        if sum(k * speeds.count(s) for k, s in zip(own, kinds, strict=True)) >= batch:
            assert taken(rows) <= taken([own[kinds.index(s)] for s in speeds]) * (1 + 1e-9)
    alike = Prices(Space(profile, listed(*[1.0] * 4), offered(), Request(gpus=4, global_batch=batch)))
    assert quickest(alike, 4) == ()
    few = Prices(Space(profile, cluster, offered(), Request(gpus=width, global_batch=width - 1)))
    assert quickest(few, width) == ()


def test_unequal_devices_begin_with_the_widths_and_weights_that_compute_soonest() -> None:
    """Whole strategies do not lead there: they send the gradients of a classifier that is better split."""
    cluster = listed(*[1.0] * 3, *[0.4] * 5)
    prices = Prices(Space(PROFILES[1], cluster, offered(), Request(gpus=8, global_batch=14)))
    stages = [s for view, among in views(prices) for s in singles(StageLookup(view, anything, among), "ilp")]
    value = first_plan(stages, None, float("inf"), 14)
    wide = next(s for s in stages if s.width == 8 and s.weights and s.num_microbatches == 1)
    wide.begin(float("inf"))
    assert value <= wide.value * (1 + 1e-9) < float("inf")


def test_the_bound_on_all_weights_has_every_layout_of_many_microbatches() -> None:
    """With few samples a wide stage has layouts that it lacks with more."""
    prices = many(32, 16, RankDevice(name="slow", speed=0.5), global_batch=64, microbatches=8)
    one = reweighted(uniform("hybrid:d8t4", prices, 8), (2,) * 16 + (1,) * 16)
    assert free_bound(prices) <= prices.of(one).cost.total_s


def test_of_equally_fast_devices_those_with_more_memory_come_first() -> None:
    devices = tuple(RankDevice(name="x", speed=s, memory_bytes=m) for s, m in ((1, 5), (2, 5), (1, 9), (2, 9)))
    cluster = replace(listed(1.0, 1.0, 1.0, 1.0), devices=devices)
    assert cluster.fastest_first() == (3, 1, 2, 0)


def test_a_stage_has_as_many_devices_as_divide_the_batch() -> None:
    asked = Request(gpus=13, global_batch=24, prefer_simple=False, time_limit_s=0.5)
    found, fewer = (
        plan(PROFILES[0], presets.load("h100-2x8-ib"), offered(), replace(asked, gpus=gpus))[0] for gpus in (13, 12)
    )
    assert found.num_ranks == fewer.num_ranks == 12
    assert found.prediction.step_time_s <= fewer.prediction.step_time_s * (1 + 1e-6)


def test_near_the_share_by_speed_every_whole_number_of_samples_is_tried() -> None:
    """Of 512 samples a rank at a sixth of the speed of the other may have any number near 73, and some others."""
    found = {w[1] * 512 // sum(w) for w in weights(listed(1.0, 1 / 6), 2, 512)}
    assert found >= set(range(68, 79))
    assert min(found) < 50
    assert max(found) > 460
    assert len(found) <= 30


def test_weights_of_large_batches_are_rounded_to_what_a_layout_takes() -> None:
    assert lowest_terms((2**26, 2**25 + 1, 1)) == (2**24, 2**23, 1)
    known = presets.load("h100-4x8-ib")
    devices = tuple(RankDevice(name=f"at {s:g}", speed=s) for s in (1.0, *(0.001,) * 31))
    cluster, batch = replace(known, devices=devices), 8_000_000
    prices = Prices(Space(PROFILES[0], cluster, offered(), Request(gpus=32, global_batch=batch)))
    cut = quickest(prices, 32)
    assert max(cut) > 2**20
    assert Layout(width=32, data=32, tensor=1, weights=cut).weights == cut
    for every in weights(cluster, 32, batch):
        Layout(width=32, data=32, tensor=1, weights=every)


def test_times_of_at_least_so_many_samples_never_fall() -> None:
    """A profile may say that 8 samples take less than 6."""
    profile = codec.load(Profile, PROFILE)
    prices = Prices(Space(profile, presets.load("4090-pcie-4"), offered(), Request(gpus=4, global_batch=256)))
    least, falls = prices.least_times, False
    for degree in (1, 2, 4):
        before = None
        for samples in range(1, 100):
            true_s = prices._times.passes(samples, degree) * prices._times.whole_ratio(samples)
            least_s = least.passes(samples, degree)
            assert (least_s <= true_s * (1 + 1e-12)).all()
            assert before is None or (least_s >= before * (1 - 1e-3)).all()
            falls, before = falls or bool((least_s < true_s * 0.9).any()), least_s
    assert falls
