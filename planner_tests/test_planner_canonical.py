"""Of plans that take equally long one is answered, whichever of them a search has met."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import known_models
import pytest

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import needed
from asa.cost.pricing import Way
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.planner import Request
from asa.planner.answer.canonical import TIE, _Around, canonical, improved
from asa.planner.budget import USUAL
from asa.planner.search import search
from asa.planner.space.baselines import uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.strategies import offered

CASES = {
    "six ranks": (known_models.vgg16(32, 100), 8000.0, "3090-pcie-8", 8),
    "three ranks": (known_models.vgg16(32, 100), 8000.0, "l4-8x1-25g-rdma", 3),
    "one stage": (known_models.transformer(6, 256), 2000.0, "a100-nvlink-8", 4),
}


@pytest.fixture(scope="module", params=CASES)
def found(request):
    """Prices, and the fastest plan, with proof."""
    graph, rate, cluster, gpus = CASES[request.param]
    where = presets.load(cluster)
    profile = on_device(known_models.profile(graph, rate, 64), where)
    prices = Prices(Space(profile, where, offered(), Request(gpus=gpus, global_batch=256)))
    answer = search(prices, solver="dp", time_limit_s=60.0, budget=replace(USUAL, patience_s=60.0))
    assert answer.best is not None
    assert prices.of(answer.best).cost.total_s <= answer.lower_bound_s * (1 + 1e-6)
    return prices, answer.best


def test_an_answer_comes_first_among_the_plans_beside_it(found):
    prices, best = found
    assert canonical(prices, best, anything).key == best.key


def test_plans_that_take_as_long_lead_to_the_same_answer(found):
    prices, best = found
    around, drawn, met = _Around(prices, best, anything), random.Random(1), set()
    for _ in range(4):
        other = best
        for _ in range(3):
            tied = [x for x in around.changes(other) if around.seconds(x, around.limit_s) <= around.limit_s]
            other = drawn.choice(tied) if tied else other
        met.add(other.key)
        assert prices.of(other).cost.total_s == pytest.approx(prices.of(best).cost.total_s, rel=3 * TIE)
        again = canonical(prices, other, anything)
        assert again.key == best.key
    if len(best.widths) > 4:
        assert len(met) > 1, "nothing tied: nothing was tested"


def test_what_comes_first_is_no_slower_and_needs_no_more(found):
    prices, best = found
    p = len(best.widths)
    if p == 1:
        pytest.skip("one stage")
    lopsided = replace(best, starts=(0, *range(len(best.ways) - p + 1, len(best.ways))))
    if prices.of(lopsided).peak.total > prices.capacity(lopsided):
        pytest.skip("does not fit")
    before_s = prices.of(lopsided).cost.total_s
    after = canonical(prices, lopsided, anything)
    assert prices.of(after).cost.total_s <= before_s * (1 + 2 * TIE)
    assert (after.ranks, len(after.widths)) <= (lopsided.ranks, p)
    faster = improved(prices, lopsided, anything)
    assert prices.of(faster).cost.total_s < 0.999 * before_s


def test_pins_hold(found):
    prices, best = found
    held = dict(enumerate(best.ways))
    again = canonical(prices, best, lambda i, way: way.layout.width != held[i].layout.width or way == held[i])
    assert all(a == b or a.layout.width != b.layout.width for a, b in zip(again.ways, best.ways, strict=True))


def test_one_component_may_run_in_another_layout_than_the_rest():
    """Of stages with more than eight ranks the styles have no such layout."""
    cluster = presets.load("v100-2x8-25g-tcp")
    profile = on_device(known_models.profile(known_models.vgg16(), 2000.0, 64), cluster)
    prices = Prices(Space(profile, cluster, offered(), Request(gpus=16, global_batch=64)))
    before = uniform("ddp", prices, 1)
    after = improved(prices, before, anything)
    assert len({way.layout for way in after.ways}) > 1
    assert prices.of(after).cost.total_s < 0.5 * prices.of(before).cost.total_s


def way_of(word: str, width: int) -> tuple[Way, int]:
    """The way that ``replicate4x1c*3`` names on a stage of ``width`` ranks, and for how many components."""
    name, data, tensor, again, count = re.fullmatch(r"([a-z]+[12]?)(\d)x(\d)(c?)\*(\d+)", word).groups()
    split = TensorDegree(strategy="tensor" if tensor > "1" else "none", degree=int(tensor))
    return Way(
        layout=Layout(width=width, data=int(data), tensor=int(tensor)), tensor=split, checkpoint=bool(again),
        data=DataDegree(strategy=name, degree=int(data)),
    ), int(count)  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "m", "widths", "starts", "stages", "share"),
    [
        # One component pays memory with its gradients, one with its optimizer state, so that two need not recompute.
        ("l4-pcie-8", 1, (4, 4), (0, 10), ("replicate4x1c*4 replicate4x1*4 zero24x1*1 replicate4x1*1",
          "zero14x1c*3 replicate4x1*1 replicate1x4*3 replicate1x1*1"), 0.985),
        # Two cuts move by one component; a stage behind them then fits only with other ways.
        ("l4-8x1-25g-rdma", 4, (2, 2, 1, 1, 1, 1), (0, 7, 11, 14, 15, 16), ("replicate2x1c*4 replicate2x1*3",
          "replicate2x1c*1 replicate2x1*3", "replicate1x1*3", "replicate1x1c*1", "replicate1x1*1", "replicate1x1*2"),
          0.95),
    ],
)  # fmt: skip
def test_components_exchange_memory(cluster, m, widths, starts, stages, share):
    where = presets.load(cluster)
    profile = on_device(known_models.profile(known_models.resnet50(32, 100), 9000.0, 64), where)
    request = Request(gpus=8, global_batch=256)
    slack = Prices(Space(profile, where, offered(), request))
    least = needed(where.device, 0.3 * slack.of(uniform("ddp", slack, 1)).peak.total, 8)
    prices = Prices(Space(profile, where, offered(), replace(request, memory_bytes=least)))
    words = [(word, width) for stage, width in zip(stages, widths, strict=True) for word in stage.split()]
    ways = tuple(way for word, width in words for way, count in [way_of(word, width)] for _ in range(count))
    before = Candidate(
        origin="asa", num_microbatches=m, ways=ways, widths=widths, starts=starts, schedule="1f1b"
    )  # fmt: skip
    assert prices.fits(before)
    after = improved(prices, before, anything)
    assert prices.fits(after)
    assert prices.of(after).cost.total_s < share * prices.of(before).cost.total_s
