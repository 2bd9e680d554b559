"""Requests at the edge of what is usual: devices of another speed or memory, whole tensors, components without
parameters, and what a refusal proposes."""

from __future__ import annotations

from dataclasses import replace

import known_models
import nouns
import pytest
from test_unequal import few, unequal

from asa.cost.machine import presets
from asa.cost.memory.peak import made_ready
from asa.errors import InfeasibleError, UsageError
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.profile import Profile
from asa.ir.units import GIB, MIB
from asa.planner import Request, parse_pin, plan, why_not
from asa.planner.answer.canonical import _Around
from asa.planner.answer.infeasible import hopeless, low_peak_plans
from asa.planner.pipeline.kinds import KindSpace
from asa.planner.pipeline.practice import _widths, practice
from asa.planner.pipeline.whole import row
from asa.planner.questions import frontier
from asa.planner.space import baselines
from asa.planner.space.baselines import uniform
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import MS
from asa.strategies import offered

VIT = known_models.profile(known_models.transformer(6, 256), 300.0, 64)


def whole_tensors(count: int, size: int, saved: int = 65536) -> Profile:
    """Equal components with one parameter tensor of ``size`` bytes each, which save ``saved`` bytes a sample."""
    tiny = nouns.profile()
    part = replace(
        tiny.graph.components[0], num_parameter_tensors=1, parameter_bytes=size, largest_parameter_bytes=size,
        saved_bytes_per_sample=float(saved),
    )  # fmt: skip
    names = [f"part.{i}" for i in range(count)]
    own = [t for t in tiny.timings if t.component == part.name]
    return replace(
        tiny,
        graph=replace(tiny.graph, components=tuple(replace(part, name=n, modules=(n,)) for n in names)),
        timings=tuple(replace(t, component=n, saved_bytes=saved * t.microbatch) for n in names for t in own),
        updates=(),
        whole=(),
    )


@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_compute_alone_is_a_bound_on_devices_of_one_speed_that_is_not_the_profile_s(speed):
    cluster = replace(presets.load("a100-nvlink-8"), devices=(RankDevice(name="any", speed=speed),) * 8)
    prices = Prices(Space(VIT, cluster, offered(), Request(gpus=8, global_batch=64)))
    for name in ("1f1b", "hybrid:d2p4", "hybrid:t2p4"):
        seconds = []
        for m in (2, 4, 8):
            candidate = uniform(name, prices, m)
            seconds.append(prices.of(candidate).cost.total_s)
            assert prices.at_least(candidate) <= seconds[-1]
        assert baselines.at_least(name, prices) <= min(seconds)


def test_gradients_that_are_copied_for_longer_than_a_forward_hide_synchronisation_too():
    cluster = nouns.cluster(4)
    cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth=1e9))
    request = Request(gpus=4, global_batch=32)
    prices = Prices(Space(whole_tensors(8, 16 * MIB), cluster, few(offered(), "replicate"), request))
    stages = StageLookup(prices, anything)
    for m in (2, 4, 8):
        compute_ms = m * sum(prices.compute(4, m)) * MS
        taken_ms = prices.of(uniform("ddp", prices, m)).cost.total_s * MS
        assert stages.independent_bound(4, m, compute_ms) <= taken_ms * (1 + 1e-9)


def test_whole_parameters_that_neighbours_share_out_count_as_what_is_printed():
    """One by one, each component would keep the state of a whole tensor on some rank."""
    profile, cluster = whole_tensors(8, 16 * MIB, MIB // 2), nouns.cluster(4)
    strategies = few(offered(), "replicate", "zero1")
    request = Request(gpus=4, global_batch=256, optimizer="adamw")
    roomy = Prices(Space(profile, cluster, strategies, request))
    candidate = uniform("zero1", roomy, 64)
    request = replace(request, memory_bytes=int(roomy.of(candidate).peak.total) + MIB)
    prices = Prices(Space(profile, cluster, strategies, request))
    assert prices.fits(candidate)
    assert not prices.fits(uniform("zero1", prices, 1))
    assert row("zero1", prices).fits
    assert not hopeless(prices)
    split, _ = practice(prices, anything)
    assert split is not None
    assert prices.fits(split)
    assert plan(profile, cluster, strategies, request)


def test_inputs_of_one_number_are_planned():
    tiny = nouns.profile()
    profile = replace(tiny, graph=replace(tiny.graph, input_shape=()))
    assert plan(profile, nouns.cluster(2), offered(), Request(gpus=2, global_batch=8))
    assert made_ready(()) == made_ready((128,))


def test_the_fastest_devices_come_first_inside_the_blocks_of_every_level():
    """Otherwise links between racks would be priced as those inside one."""
    box = nouns.cluster(8)
    levels = tuple(replace(box.levels[0], name=f"of {n}", devices=n) for n in (2, 4, 8))
    speeds = (0.9, 1.0, 0.1, 0.1, 0.9, 0.9, 0.8, 0.8)
    devices = tuple(RankDevice(name="any", speed=s) for s in speeds)
    order = replace(box, levels=levels, devices=devices).fastest_first()
    assert order is not None
    for each in (2, 4):
        assert all(len({r // each for r in order[a : a + each]}) == 1 for a in range(0, 8, each))
    assert order == (4, 5, 6, 7, 1, 0, 2, 3)


def test_a_curve_compares_limits_with_the_memory_of_the_devices_in_use():
    request = Request(gpus=2, global_batch=8)
    points = frontier.against_memory(nouns.profile(), nouns.cluster(2), offered(), request, points=4)
    have = points[-1].limit_bytes
    cluster = unequal(1.0, 1.0, memories=(have, have))
    again = frontier.against_memory(nouns.profile(), cluster, offered(), request, points=4)
    assert [p.fits for p in again] == [False] * (len(again) - 1) + [True]
    assert len(again) > 1


def test_a_curve_goes_down_to_what_is_enough_with_optimizer_state_on_the_host():
    profile = known_models.profile(known_models.transformer(4, 1024), 300.0, 64)
    request = Request(gpus=1, global_batch=8, optimizer="adamw")
    cluster = presets.load("a100-nvlink-8")
    points = frontier.against_memory(profile, cluster, offered(), request, points=3)
    with pytest.raises(InfeasibleError):
        plan(profile, cluster, offered(), replace(request, memory_bytes=points[-1].limit_bytes - 64 * MIB))


def test_plans_with_low_peaks_have_the_widths_of_the_named_space():
    space = Space(nouns.profile(), nouns.cluster(18), offered(), Request(gpus=18, global_batch=72))
    widths = {x.candidate.widths for x in low_peak_plans(Prices(space))}
    assert any(len(w) > 1 for w in widths)
    for each in widths:
        assert set(each) <= set(space.single_widths() if len(each) == 1 else space.several(18))


def test_a_remedy_of_memory_is_enough_for_the_device_that_holds_most():
    """The first device is too small by little; the second has much more memory, and its stage needs that."""
    cluster, strategies = unequal(1.0, 0.5, memories=(2 * MIB, 300 * MIB)), few(offered(), "replicate")
    strategies = replace(strategies, schedules={"1f1b": offered().schedules["1f1b"]})
    request = Request(gpus=2, global_batch=8)
    with pytest.raises(InfeasibleError, match="try --memory") as caught:
        plan(nouns.profile(), cluster, strategies, request)
    enough = float(str(caught.value).split("--memory ")[1].split("GiB")[0])
    assert plan(nouns.profile(), cluster, strategies, replace(request, memory_bytes=int(enough * GIB)))


def normed() -> Profile:
    tiny = nouns.profile()
    parts = tuple(replace(c, batch_norm=c.name == "body.0") for c in tiny.graph.components)
    timings = tuple(t for t in tiny.timings if t.microbatch > 1)
    return replace(tiny, graph=replace(tiny.graph, components=parts), timings=timings)


def test_too_many_microbatches_for_batch_norm_are_refused_with_remedies_that_work():
    request = Request(gpus=2, global_batch=8, microbatches=8)
    says = r"body\.0 needs at least 2 samples .* 8 in 8 microbatches; try --microbatches 4 or --global-batch 16"
    with pytest.raises(InfeasibleError, match=says):
        plan(normed(), nouns.cluster(2), offered(), request)
    for change in ({"microbatches": 4}, {"global_batch": 16}):
        assert plan(normed(), nouns.cluster(2), offered(), replace(request, **change))


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ("stem=tensor@2", "stem cannot be split: too narrow"),
        ("head=replicate@16", "every rank needs a sample"),
    ],
)
def test_a_pin_that_a_component_refuses_says_why(pin, says):
    tiny = nouns.profile()
    parts = tuple(replace(c, tied=c.name == "body.0") for c in tiny.graph.components)
    profile = replace(tiny, graph=replace(tiny.graph, components=parts))
    with pytest.raises(InfeasibleError, match=says):
        plan(profile, nouns.cluster(4), offered(), Request(gpus=4, global_batch=8, pins=(parse_pin(pin),)))


@pytest.mark.parametrize("pin", ["*=zero3@2", "*=zero1"])
def test_a_pin_to_a_data_strategy_holds_for_components_without_parameters(pin):
    tiny = nouns.profile()
    empty = {"parameter_bytes": 0, "largest_parameter_bytes": 0, "num_parameter_tensors": 0, "split": None}
    parts = tuple(replace(c, **empty) if c.name == "body.0" else c for c in tiny.graph.components)
    profile = replace(tiny, graph=replace(tiny.graph, components=parts))
    found = plan(profile, nouns.cluster(2), offered(), Request(gpus=2, global_batch=8, pins=(parse_pin(pin),)))[0]
    strategy = parse_pin(pin).strategy
    assert [c.data.strategy for c in found.components] == [strategy, "replicate", strategy]
    assert {c.data.degree for c in found.components} == {2}


def test_devices_that_a_strategy_leaves_idle_are_not_said_to_be_slower():
    request = Request(gpus=4, global_batch=8, strategies=("single",))
    notes = plan(nouns.profile(), nouns.cluster(4), offered(), request)[0].notes
    assert "1 of 4 devices are used, as asked for" in notes
    assert not any("faster" in note for note in notes)


def test_what_is_forced_is_searched_for_as_a_pin_is():
    """In wide stages only pins allow layouts that repeat work."""
    cluster: Cluster = presets.load("h100-4x8-ib")
    profile = known_models.profile(known_models.transformer(4, 512), 100.0, 64)
    request = Request(gpus=32, global_batch=512, prefer_simple=False)
    answer, pin = plan(profile, cluster, offered(), request)[0], "embedding=replicate@16"
    found = why_not(answer, profile, cluster, offered(), pin)
    pinned = plan(profile, cluster, offered(), replace(request, pins=(parse_pin(pin),)))[0]
    assert found.other_s is not None
    assert found.other_s <= 1.02 * pinned.prediction.step_time_s


def test_components_that_take_no_time_are_planned_and_drawn_as_a_curve():
    tiny = nouns.profile()
    none = nouns.stat(0.0)
    timings = tuple(replace(t, forward=none, backward=none) for t in tiny.timings)
    updates = tuple(replace(u, step=none) for u in tiny.updates)
    profile = replace(tiny, timings=timings, updates=updates, dispatch_floor_s=0.0, whole=())
    for gpus in (1, 2):
        assert plan(profile, nouns.cluster(2), offered(), Request(gpus=gpus, global_batch=8))
    request = Request(gpus=2, global_batch=8)
    assert frontier.against_cost(profile, nouns.cluster(2), offered(), request, price=1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_pin_may_be_the_stricter_one_of_two(order):
    pins = tuple(map(parse_pin, ("*=zero3", "head=zero3@4")))[::order]
    found = plan(nouns.profile(), nouns.cluster(4), offered(), Request(gpus=4, global_batch=8, pins=pins))[0]
    assert {c.data.strategy for c in found.components} == {"zero3"}
    assert {c.name: c.data.degree for c in found.components}["head"] == 4
    pins = tuple(map(parse_pin, ("*=zero3", "head=zero3@1")))[::order]
    with pytest.raises(UsageError, match="contradict"):
        plan(nouns.profile(), nouns.cluster(4), offered(), Request(gpus=4, global_batch=8, pins=pins))


@pytest.mark.parametrize("microbatches", [4, 8])
def test_where_nothing_fits_a_smaller_batch_is_one_that_the_microbatches_asked_for_divide(microbatches):
    request = Request(gpus=2, global_batch=8, microbatches=microbatches, memory_bytes=60 * MIB)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan(nouns.profile(), nouns.cluster(2), offered(), request)


def test_pins_hold_however_much_memory_there_is():
    """Components that a stage may not run are kept out of it by what they would hold."""
    strategies = few(offered(), "replicate", "zero1", schedules=("1f1b", "gpipe"))
    pins = (parse_pin("stem=replicate@2"), parse_pin("head=zero1@3"))
    request = Request(gpus=5, global_batch=12, pins=pins, prefer_simple=False, time_limit_s=20)
    profile, usual = nouns.profile(), nouns.cluster(5)
    huge = replace(usual, device=replace(usual.device, memory_bytes=2**62))
    answers = [plan(profile, cluster, strategies, request)[0] for cluster in (usual, huge)]
    for answer in answers:
        by_name = {c.name: c.data for c in answer.components}
        assert (by_name["stem"].strategy, by_name["stem"].degree) == ("replicate", 2)
        assert (by_name["head"].strategy, by_name["head"].degree) == ("zero1", 3)
    assert answers[1].prediction.step_time_s == pytest.approx(answers[0].prediction.step_time_s)


def test_the_named_space_has_every_width_that_stages_of_one_kind_may_have():
    """A kind with a row of 12 devices may have a stage of 12, though not every stage may."""
    cluster = unequal(*[1.0] * 12, *[0.5] * 4)
    space = Space(nouns.profile(), cluster, offered(), Request(gpus=16, global_batch=64))
    staged = KindSpace(Prices(space), anything)
    widths = {staged.width(w) for w in staged.widths()}
    others = {w for w in widths if w > 8 and w % 8}
    assert others == {12}
    assert "also as many as its longest row has" in space.describe()


def test_devices_of_one_speed_keep_one_share_of_the_batch_whatever_their_memory():
    """The space that certificates name has weights by speed."""
    cluster = unequal(1.0, 1.0, 0.5, 0.5, memories=(2**33, 2**32, 2**33, 2**33))
    prices = Prices(Space(nouns.profile(), cluster, offered(), Request(gpus=4, global_batch=64)))
    begun = uniform("ddp", prices, 1)
    cuts = [x.ways[0].layout.weights for x in _Around(prices, begun, anything)._cut_otherwise(begun)]
    assert cuts
    assert all(w[0] == w[1] and w[2] == w[3] and w[0] != w[2] for w in cuts)


def test_an_answer_is_improved_to_widths_of_the_named_space_only():
    """Stages of several have up to 8 ranks or multiples of 8; a single stage may have a node of 20."""
    box = nouns.cluster(40)
    nodes = replace(box, levels=(replace(box.levels[0], name="node", devices=20), box.levels[0]))
    space = Space(nouns.profile(), nodes, offered(), Request(gpus=40, global_batch=96))
    assert 20 in _widths(space)
    assert set(_widths(space)) <= set(space.single_widths())
    assert "or of a node" in space.describe()
    prices = Prices(Space(nouns.profile(), box, offered(), Request(gpus=40, global_batch=96)))
    begun = uniform("hybrid:d16p2", prices, 4)
    widths = {w for x in _Around(prices, begun, anything)._fewer(begun) for w in x.widths}
    assert widths > {8, 16}
    assert widths <= set(prices.space.several(40))
