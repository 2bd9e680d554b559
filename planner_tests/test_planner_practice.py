"""Whole strategies that recompute: standard practice is in the race."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import known_models
import pytest

from asa.cost.machine import presets
from asa.errors import InfeasibleError, UsageError
from asa.ir.units import GIB
from asa.planner import Request, plan
from asa.planner.pipeline.practice import practice
from asa.planner.pipeline.whole import table
from asa.planner.space import baselines
from asa.planner.space.baselines import Unavailable, uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.strategies import offered

SCRIPT = importlib.util.spec_from_file_location(
    "practice_script", Path(__file__).resolve().parent.parent / "benchmarks" / "practice.py"
)
assert SCRIPT is not None
assert SCRIPT.loader is not None
enumeration = importlib.util.module_from_spec(SCRIPT)
sys.modules[SCRIPT.name] = enumeration
SCRIPT.loader.exec_module(enumeration)

PROFILE = known_models.profile(known_models.transformer(6, 512), 300.0, 64)


def prices(cluster: str, gpus: int, memory: float | None, batch: int = 64) -> Prices:
    asked = Request(gpus=gpus, global_batch=batch, optimizer="adamw", memory_bytes=memory and int(memory))
    return Prices(Space(PROFILE, presets.load(cluster), offered(), asked))


def by_hand(found: Prices) -> float:
    """Seconds of the fastest uniform split that fits, of those with the first components of a stage recomputed."""
    gpus, best = found.space.request.gpus, float("inf")
    n = len(PROFILE.graph)
    for d, t in [(d, t) for d in range(1, gpus + 1) for t in range(1, gpus + 1) if gpus % (d * t) == 0]:
        name = f"hybrid:d{d}t{t}p{gpus // d // t}"
        for m in (1, 2, 4, 8, 16):
            try:
                again = uniform(name + "+ckpt", found, m)
                plain = uniform(name, found, m)
            except Unavailable:
                continue
            for kind in ("replicate", "zero1", "zero2", "zero3"):
                for count in range(n + 1):
                    stops = {i for s in again.starts for i in range(s, min(n, s + count))}
                    ways = [again.ways[i] if i in stops else plain.ways[i] for i in range(n)]
                    ways = [
                        replace(w, data=replace(w.data, strategy=kind)) if d > 1 and c.parameter_bytes else w
                        for w, c in zip(ways, PROFILE.graph.components, strict=True)
                    ]
                    one = replace(again, ways=tuple(ways))
                    if found.fits(one):
                        best = min(best, found.of(one).cost.total_s)
    return best


@pytest.mark.parametrize(("cluster", "gpus", "memory"), [
    ("a100-nvlink-8", 2, 3.0e9), ("t4-8x1-25g-tcp", 4, 2.5e9), ("v100-dgx1-8", 4, 2.2e9), ("h100-nvlink-8", 1, 3e9),
])  # fmt: skip
def test_no_uniform_split_is_faster(cluster: str, gpus: int, memory: float) -> None:
    found = prices(cluster, gpus, memory)
    best, _ = practice(found, anything)
    by = by_hand(found)
    if best is None:
        assert by == float("inf")
    else:
        assert found.fits(best)
        assert found.of(best).cost.total_s <= by * (1 + 5e-3)


def test_the_answer_is_never_behind_standard_practice() -> None:
    asked = Request(gpus=8, global_batch=64, optimizer="adamw", memory_bytes=int(2.4e9), time_limit_s=0.2)
    found = plan(PROFILE, presets.load("a100-nvlink-8"), offered(), asked)[0]
    rows = {b.name: b for b in found.baselines}
    assert {"ddp+ckpt", "fsdp+ckpt", "tensor+ckpt", "hybrid+ckpt"} <= set(rows)
    fitting = [b.step_time_s for b in rows.values() if b.fits]
    assert found.prediction.step_time_s <= min(fitting) * (1 + 1e-9)
    assert rows["hybrid+ckpt"].fits
    assert not rows["ddp"].fits


def test_over_several_nodes_no_other_whole_strategy_is_faster() -> None:
    found = prices("h100-4x8-ib", 32, 2.6e9, batch=64)
    tried, _ = practice(found, anything)
    assert isinstance(tried, Candidate)
    assert found.of(tried).cost.total_s <= min(
        (r.seconds for r in table(found) if r.fits and not r.name.endswith("+ckpt")), default=float("inf")
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ddp+ckpt", "fsdp+ckpt", "hybrid:d2t2+ckpt", "hybrid+ckpt", "1f1b+ckpt"])
def test_they_can_be_asked_for_by_name(name: str) -> None:
    asked = Request(gpus=4, global_batch=64, strategies=(name,))
    found = plan(PROFILE, presets.load("a100-nvlink-8"), offered(), asked)[0]
    assert found.strategy == name
    if name != "hybrid+ckpt":  # which recomputes where memory asks for it, and here it does not
        able = {c.name for c in PROFILE.graph.components if c.saved_bytes_per_sample > c.output_bytes_per_sample}
        assert {c.name for c in found.components if c.checkpoint} == able


@pytest.mark.parametrize("name", ["asa+ckpt", "ddp+ckpt+ckpt", "+ckpt", "no+ckpt"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        baselines.check((name,), offered(), 4)
    with pytest.raises(UsageError):
        baselines.check(("ddp+ckpt",), replace(offered(), checkpoint=False), 4)


@pytest.mark.parametrize(("cluster", "gpus", "memory"), [
    ("t4-8x1-25g-tcp", 2, 3e9), ("v100-dgx1-8", 2, 3e9),
])  # fmt: skip
def test_no_enumerated_plan_is_faster_than_the_answer(cluster: str, gpus: int, memory: float) -> None:
    asked = Request(
        gpus=gpus, global_batch=64, optimizer="adamw", memory_bytes=int(memory), offload="never", time_limit_s=0.4
    )
    row = enumeration.compared("small", PROFILE, presets.load(cluster), asked)
    assert row is not None
    assert row.behind <= enumeration.BEHIND
    assert 0 < row.by_hand_s < float("inf")


def test_the_enumeration_notices_a_slower_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(profile, cluster, strategies, request):
        found = plan(profile, cluster, strategies, request)
        slow = replace(found[0].prediction, step_time_s=1.01 * found[0].prediction.step_time_s)
        return (replace(found[0], prediction=slow), *found[1:])

    monkeypatch.setattr(enumeration, "plan", slower)
    asked = Request(gpus=1, global_batch=64, optimizer="adamw", offload="never", time_limit_s=0.2)
    assert enumeration.compared("small", PROFILE, presets.load("h100-nvlink-8"), asked).behind > enumeration.BEHIND


def test_a_batch_that_fits_is_not_cut_because_small_parts_were_measured_faster() -> None:
    whole = PROFILE.timings

    def slower(timing):  # twice the time for each sample from 16 samples on, as on a machine that was busy just then
        stretch = 2.0 if timing.microbatch >= 16 else 1.0
        times = {k: getattr(timing, k) for k in ("forward", "backward")}
        return replace(timing, **{k: replace(t, **{q: stretch * getattr(t, q) for q in ("median", "p10", "p90")})
                                  for k, t in times.items()})  # fmt: skip

    profile = replace(PROFILE, timings=tuple(slower(t) for t in whole))
    cluster = presets.load("a100-nvlink-8")

    def counts(memory: float | None) -> set[int]:
        asked = Request(gpus=1, global_batch=64, optimizer="adamw", memory_bytes=memory and int(memory))
        best, _ = practice(Prices(Space(profile, cluster, offered(), asked)), anything)
        assert best is not None
        return {best.num_microbatches, plan(profile, cluster, offered(), asked)[0].num_microbatches}

    assert counts(None) == {1}
    assert 1 not in counts(3e9)  # there memory asks for several


@pytest.mark.parametrize(("cluster", "gpus", "name"), [
    ("a100-nvlink-8", 2, "hybrid+ckpt"), ("a100-nvlink-8", 1, "hybrid+ckpt"), ("v100-dgx1-8", 4, "hybrid+ckpt,ddp"),
])  # fmt: skip
def test_where_no_uniform_split_fits_a_remedy_that_works_is_named(cluster: str, gpus: int, name: str) -> None:
    asked = Request(gpus=gpus, global_batch=64, optimizer="adamw", memory_bytes=2 * GIB, strategies=(*name.split(","),))
    if gpus == 1:
        asked = replace(asked, memory_bytes=GIB)
    with pytest.raises(InfeasibleError, match=r"no uniform split fits.*try --memory") as caught:
        plan(PROFILE, presets.load(cluster), offered(), asked)
    enough = float(str(caught.value).split("--memory ")[1].split("GiB")[0])
    assert plan(PROFILE, presets.load(cluster), offered(), replace(asked, memory_bytes=int(enough * GIB)))


def test_stages_are_balanced_with_what_they_recompute() -> None:
    deep = known_models.profile(known_models.transformer(48, 512), 300.0, 64)
    asked = Request(gpus=4, global_batch=64, optimizer="adamw", memory_bytes=int(3.6 * GIB))
    found = Prices(Space(deep, presets.load("t4-8x1-25g-tcp"), offered(), asked))
    best, _ = practice(found, anything)
    assert best is not None
    assert len(best.widths) == 4
    m = best.num_microbatches
    again, plain = (uniform(f"hybrid:d1t1p4{x}", found, m) for x in ("+ckpt", ""))
    even = again
    for a, b in pairwise((*again.starts, len(again.ways))):  # each stage of equal compute recomputes as few as fit
        some = (replace(even, ways=(*even.ways[:k], *plain.ways[k:b], *even.ways[b:])) for k in range(a, b + 1))
        even = next(x for x in some if found.fits(x))
    assert found.of(best).cost.total_s < 0.99 * found.of(even).cost.total_s
    assert best.starts != even.starts


def test_splits_that_were_not_tried_are_in_the_bound() -> None:
    found = prices("v100-2x8-25g-tcp", 16, None)
    best, bound_s = practice(found, anything)
    assert bound_s == float("inf")
    none, bound_s = practice(found, anything, -1e9)
    assert none is None
    assert bound_s <= found.of(best).cost.total_s
    first, bound_s = practice(found, anything, -1e9, 1e12)  # until one fits, and no longer
    assert found.fits(first)
    assert bound_s <= found.of(best).cost.total_s < found.of(first).cost.total_s


def test_a_search_of_uniform_splits_that_was_stopped_proves_no_more_than_it_tried() -> None:
    cluster = presets.load("v100-2x8-25g-tcp")
    asked = Request(gpus=16, global_batch=64, strategies=("hybrid+ckpt",), time_limit_s=60)
    longer = plan(PROFILE, cluster, offered(), asked)[0]
    assert longer.certificate.status == "optimal"
    stopped = plan(PROFILE, cluster, offered(), replace(asked, time_limit_s=1e-3))[0]
    assert stopped.prediction.step_time_s > longer.prediction.step_time_s
    assert stopped.certificate.status == "feasible"
    assert stopped.certificate.lower_bound_s <= longer.prediction.step_time_s


def test_a_pipeline_asked_for_by_name_has_the_fastest_number_of_microbatches() -> None:
    def slower(timing):  # microbatches of 16 samples take 1.5 times as long for each sample
        stretch = 1.5 if timing.microbatch == 16 else 1.0
        times = {k: getattr(timing, k) for k in ("forward", "backward")}
        return replace(timing, **{k: replace(t, **{q: stretch * getattr(t, q) for q in ("median", "p10", "p90")})
                                  for k, t in times.items()})  # fmt: skip

    profile, cluster = replace(PROFILE, timings=tuple(map(slower, PROFILE.timings))), presets.load("a100-nvlink-8")
    asked = Request(gpus=4, global_batch=64, strategies=("1f1b",))
    found = plan(profile, cluster, offered(), asked)[0]
    own = Prices(Space(profile, cluster, offered(), asked))
    fastest = min(own.of(c).cost.total_s for c in baselines.candidates("1f1b", own) if own.fits(c))
    assert found.certificate.status == "optimal"
    assert found.prediction.step_time_s == pytest.approx(fastest, rel=1e-9)
