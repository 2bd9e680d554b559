"""First plans of several stages: near the best there are, on fewer ranks and on unequal devices, too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import needed
from asa.ir import codec
from asa.ir.cluster import RankDevice
from asa.ir.profile import Profile
from asa.planner import Request, clock
from asa.planner.answer.canonical import improved
from asa.planner.pipeline.climb import Climber, Neighbours, first_plans, mixed_plan
from asa.planner.pipeline.practice import on_fewer, practice
from asa.planner.pipeline.sketch import PipelineOutline, Sketch
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.strategies import offered

INF = float("inf")
PROFILES = Path(__file__).resolve().parent.parent / "profiles"


def prices(model: str, cluster: str, gpus: int, batch: int) -> Prices:
    path, where = PROFILES / f"{model}.cpu.fp32.json", presets.load(cluster)
    profile = on_device(codec.load(Profile, path), where)
    return Prices(Space(profile, where, offered(), Request(gpus=gpus, global_batch=batch)))


def first_s(model: str, cluster: str, gpus: int, batch: int) -> float:
    own = prices(model, cluster, gpus, batch)
    return own.of(first_plans(own, anything, INF, INF)[0]).cost.total_s


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "few", "many"),
    [
        ("vit_b_16", "v100-2x8-25g-tcp", 16, 3, 7),
        ("resnet50", "a100-nvlink-8", 100, 4, 7),
        ("resnet50", "3090-pcie-8", 64, 2, 6),
    ],
)
def test_more_devices_are_not_worse_to_begin_with(model, cluster, batch, few, many):
    # What is best here is one microbatch through stages of fewer ranks than there are.
    assert first_s(model, cluster, many, batch) <= first_s(model, cluster, few, batch) * 1.002


@pytest.mark.parametrize("devices", [8, 32])
def test_outlines_of_unequal_devices_have_stages_of_one_kind_each(devices):
    where, fast = presets.load("h100-4x8-ib" if devices > 8 else "a100-nvlink-8"), devices * 3 // 8
    kinds = [RankDevice(name=f"at {s:g}", speed=s) for s in (1.0, 0.5)]
    where = replace(where, devices=tuple(kinds[rank >= fast] for rank in range(devices)))
    profile = on_device(codec.load(Profile, PROFILES / "resnet50.cpu.fp32.json"), where)
    own = Prices(Space(profile, where, offered(), Request(gpus=devices, global_batch=64)))
    outlines = [x for m in (1, 4) for x in Sketch(own, anything, INF).plans(m)]
    assert any(sum(x.widths) > fast for x in outlines)
    for x in outlines:
        firsts = (0, *itertools.accumulate(x.widths))
        assert all(len({where.speed(r) for r in range(a, b)}) == 1 for a, b in itertools.pairwise(firsts))


def test_first_plans_do_not_depend_on_how_busy_the_machine_is(monkeypatch):
    found = []
    for busy in (False, True):
        if busy:  # a clock that leaves no time at all
            ticks = itertools.count(1)
            monkeypatch.setattr(clock, "now", lambda ticks=ticks: 1e6 * next(ticks))
        own = prices("resnet50", "l4-pcie-8", 8, 64)
        begun = clock.counted()
        some = [
            practice(own, anything, clock.counted() + 0.05)[0],
            on_fewer(own, anything, INF, clock.counted() + 0.05),
            first_plans(own, anything, INF, clock.counted() + 0.1)[0],
        ]
        some.append(improved(own, some[-1], anything, clock.counted() + 0.05))
        found.append(([x.key for x in some], clock.counted() - begun))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)
    assert found[0][1] > 0.1, "limits cut them off"


def test_stages_on_slow_devices_are_priced_as_such():
    own = prices("vit_b_16", "4090-2-3090-2-pcie", 4, 16)
    climber = Climber(Sketch(own, anything, INF))
    style = climber.sketch.styles(1, 1, save_memory=False)[0]
    outline = PipelineOutline((0, 4, 9), (1, 1, 1), (style,) * 3, 1, "1f1b")
    found = climber.candidate(outline) if climber.seconds(outline) < INF else None
    assert found is not None
    assert climber.seconds(outline) == pytest.approx(own.of(found).cost.total_s)
    wide = climber.sketch.styles(2, 1, save_memory=False)[0]
    across = PipelineOutline((0, 4, 9), (1, 2, 1), (style, wide, style), 1, "1f1b")  # one of a kind, one of the other
    assert climber.seconds(across) == INF


def test_unequal_devices_get_a_first_plan_of_the_fast_ones():
    own = prices("vit_b_16", "4090-2-3090-2-pcie", 4, 16)
    found = first_plans(own, anything, INF, INF)[0]
    assert (found.widths, found.num_microbatches) == ((1, 1), 1)


def test_an_outline_recomputes_what_does_not_fit():
    own = prices("vit_b_16", "l4-8x1-25g-rdma", 8, 256)
    stored = Climber(Sketch(own, anything, INF))
    style = stored.sketch.styles(2, 4, save_memory=False)[-1]
    outline = PipelineOutline((0, 3, 7, 10), (2, 2, 2, 2), (style,) * 4, 4, "1f1b")
    assert stored.seconds(outline) < INF
    peak, device = own.of(stored.candidate(outline)).peak.total, own.space.cluster.device
    request = replace(own.space.request, memory_bytes=needed(device, 0.9 * peak, 8))
    tight = Prices(Space(own.space.profile, own.space.cluster, offered(), request))
    climber = Climber(Sketch(tight, anything, INF))
    assert stored.seconds(outline) < climber.seconds(outline) < INF
    found = climber.candidate(outline)
    assert tight.fits(found)
    assert 0 < sum(way.checkpoint for way in found.ways) < len(found.ways)


def test_cuts_in_a_row_move_together():
    # Of equal components in stages of equal length, moving one cut alone makes a stage longer.
    own = prices("vit_b_16", "l4-pcie-8", 4, 64)
    sketch = Sketch(own, anything, INF)
    style = sketch.styles(1, 4, save_memory=False)[0]
    x = PipelineOutline((0, 3, 6, 9), (1, 1, 1, 1), (style,) * 4, 4, "1f1b")
    found = {y.starts for y in Neighbours(sketch).of(x)}
    assert {(0, 4, 7, 9), (0, 2, 5, 8), (0, 3, 7, 10), (0, 4, 7, 10)} <= found
    assert all(a < b for starts in found for a, b in itertools.pairwise(starts))


def test_styles_split_tokens_where_components_can():
    own = prices("vit_b_16", "l4-pcie-8", 8, 64)
    sketch = Sketch(own, anything, INF)
    style = next(x for x in sketch.styles(4, 1, save_memory=False) if x.sequence and x.tensor == 2)
    names = [sketch.way(i, 4, style).tensor.strategy for i in range(sketch.n)]
    assert set(names[1:-1]) == {"sequence"}
    assert "sequence" not in (names[0], names[-1])
    ways = [sketch.way(i, 4, style) for i in range(sketch.n)]
    assert all(way.layout.sequence == (way.tensor.strategy == "sequence") for way in ways)
    without = prices("resnet50", "l4-pcie-8", 8, 64)
    assert not any(x.sequence for x in Sketch(without, anything, INF).styles(4, 1, save_memory=True))


def test_on_many_devices_stages_of_different_widths_are_tried_in_the_end():
    own = prices("vgg16", "h100-4x8-ib", 24, 96)
    sketch = Sketch(own, anything, INF)
    climber = Climber(sketch)
    alike = min((x for m in (4, 8) for x in sketch.plans(m)), key=climber.seconds)
    assert len(set(alike.widths)) == 1
    known = climber.candidate(alike)
    mixed = mixed_plan(own, anything, known, INF)
    assert mixed is not None
    assert len(set(mixed.widths)) > 1
    assert own.fits(mixed)
    assert own.of(mixed).cost.total_s < own.of(known).cost.total_s
