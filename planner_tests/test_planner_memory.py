"""One memory: what is searched with is never more than what is printed, and what is printed decides."""

from __future__ import annotations

import random
from dataclasses import replace

import known_models
import pytest
import test_planner_menu
from tables import some

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import libraries, needed
from asa.errors import InfeasibleError
from asa.ir.cluster import Cluster
from asa.ir.graph import LayerGraph
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.shortage import Shortage
from asa.ir.units import GIB, binary
from asa.planner import Request, plan, verify
from asa.planner.pipeline.staged import Skeleton, StagedSpace
from asa.planner.pipeline.whole import table
from asa.planner.questions import frontier
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage import exhaustive
from asa.scheduler.memory import corrected
from asa.strategies import offered

SPACES = {
    "vgg": Space(
        known_models.profile(known_models.vgg16(), 500.0, 64), presets.load("v100-dgx1-8"), offered(),
        Request(gpus=8, global_batch=64, optimizer="adamw"),
    ),
    **{name: x for name, x in test_planner_menu.spaces().items() if name not in ("unequal", "weights")},
}  # fmt: skip


def stages(rng: random.Random, space: Space, schedule: str) -> list[tuple[float, float, bool]]:
    """Of a pipeline at random, per stage: the sum over components, what is printed, and whether all microbatches are
    ahead when the first one comes back."""
    prices = Prices(space)
    staged, n = StagedSpace(prices, anything), len(space.profile.graph)
    count = rng.randint(2, min(3, space.request.gpus, n))
    starts = (0, *sorted(rng.sample(range(1, n), count - 1)))
    widths = tuple(rng.choice([w for w in (1, 2, 4) if w * count <= space.request.gpus]) for _ in range(count))
    m, choices = rng.choice([1, 2, 4]), []
    if any(staged.chain(w, m) is None for w in widths):
        return []
    for start, stop, width in zip(starts, (*starts[1:], n), widths, strict=True):
        chain, alike = staged.chain(width, m), rng.random() < 0.5
        ways = staged.formulation(width, m).ways
        picked, wanted = [], rng.random()
        for i in range(start, stop):
            same = [k for k, w in enumerate(ways[i]) if picked and alike and w == ways[i - 1][picked[-1]]]
            at = int((wanted if alike else rng.random()) * len(chain.configs[i]))
            picked.append(same[0] if same else at)
        choices.append(tuple(picked))
    skeleton = Skeleton(starts=starts, widths=widths, num_microbatches=m, schedule=schedule)
    price, found = prices.of(staged.candidate(skeleton, choices)), []
    for s, (stage, choice) in enumerate(zip(price.stages, choices, strict=True)):
        in_flight = space.schedules[schedule].in_flight(s, count, m)
        problem = staged.chain(widths[s], m).stage(stage.start, stage.start + len(choice), in_flight)
        found.append((exhaustive.peak(problem, choice) * GIB, stage.most, 1 < m <= in_flight))
    return found


@pytest.mark.parametrize("name", list(SPACES))
def test_the_sum_over_components_is_never_above_what_is_printed(name: str) -> None:
    space, seen = SPACES[name], []
    for seed in range(40):
        seen += stages(random.Random(seed), space, random.Random(seed).choice(["gpipe", "1f1b"]))
    assert len(seen) > 20
    assert all(least <= printed * (1 + 1e-9) for least, printed, _ in seen)
    assert any(ahead for _, _, ahead in seen)
    # Most of the time it is just that: a bound far below would say little.
    assert sum(least >= 0.9 * printed for least, printed, _ in seen) > len(seen) / 2


@pytest.mark.parametrize("name", some(["zero1", "gpipe", "fsdp", "1f1b"], ["zero1", "1f1b"]))
def test_a_whole_strategy_is_to_be_had_in_what_it_is_said_to_need(name: str) -> None:
    profile, cluster = known_models.profile(known_models.vgg16(), 500.0, 64), presets.load("v100-dgx1-8")
    request = Request(gpus=4, global_batch=64, optimizer="adamw", strategies=(name,))
    first = plan(profile, cluster, offered(), request)[0]
    prices = Prices(Space(profile, cluster, offered(), request))
    said = max(first.prediction.memory_bytes_per_rank)
    context = cluster.device.memory_bytes - prices.space.capacity(4)
    least = int((said + 64e3) * 1.2 + context)  # more than enough for what is set aside
    for memory in (least, int(least * 0.6)):
        asked = replace(request, memory_bytes=memory)
        rows = {r.name: r for r in table(Prices(Space(profile, cluster, offered(), asked)))}
        fits = rows[name].price.stages and max(s.most for s in rows[name].price.stages) <= Space(
            profile, cluster, offered(), asked
        ).capacity(4)  # fmt: skip
        assert rows[name].fits == fits
        if fits:
            found = plan(profile, cluster, offered(), asked)[0]
            assert max(found.prediction.memory_bytes_per_rank) <= memory
        else:
            with pytest.raises(InfeasibleError, match="iB of"):
                plan(profile, cluster, offered(), asked)


def test_a_plan_that_only_the_sum_ruled_out_is_found() -> None:
    """GPipe in four microbatches: gradients are made while the activations of the first microbatch go."""
    profile, cluster = known_models.profile(known_models.transformer(), 300.0, 64), presets.load("t4-8x1-25g-tcp")
    request = Request(gpus=3, global_batch=64, optimizer="adamw", prefer_simple=False)
    rows = {r.name: r for r in table(Prices(Space(profile, cluster, offered(), request)))}
    held = max(s.most for s in rows["gpipe"].price.stages)
    prices = Prices(Space(profile, cluster, offered(), replace(request, memory_bytes=int(held * 1.05 + 2.3e9))))
    tight = replace(request, memory_bytes=int(2.3e9 + held * 1.05))
    found = plan(profile, cluster, offered(), tight)[0]
    again = {r.name: r for r in table(prices)}
    assert found.certificate.lower_bound_s <= min(r.seconds for r in again.values() if r.fits) * (1 + 1e-9)
    assert verify(found, profile, cluster, offered()).step_time_s == pytest.approx(found.prediction.step_time_s)


def in_just_enough(name: str) -> tuple[Profile, Cluster, Request, Plan]:
    """A whole strategy on devices with just the memory that it needs."""
    profile, cluster = known_models.profile(known_models.transformer(6, 512), 300.0, 64), presets.load("a100-nvlink-8")
    request = Request(gpus=2, global_batch=64, optimizer="adamw", strategies=(name,), offload="never")
    row = next(r for r in table(Prices(Space(profile, cluster, offered(), request))) if r.name == name)
    request = replace(request, memory_bytes=needed(cluster.device, row.price.peak.total, 2) + 16)
    return profile, cluster, request, plan(profile, cluster, offered(), request)[0]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_what_is_printed_is_what_limits_are_compared_with(name: str) -> None:
    """Workspaces of libraries are part of what is printed, and of the context that is left free."""
    profile, cluster, request, found = in_just_enough(name)
    (point,) = frontier._as_points([found], cluster, request.memory_bytes)
    assert point.fits
    assert point.limit_bytes > request.memory_bytes - 32
    less = replace(request, memory_bytes=request.memory_bytes - 2**21, microbatches=found.num_microbatches)
    with pytest.raises(InfeasibleError, match=f"{binary(point.memory_bytes_max)} of ".replace(".", r"\.")):
        plan(profile, cluster, offered(), less)


def test_after_a_shortage_the_plan_that_failed_does_not_fit() -> None:
    profile, cluster, request, found = in_just_enough("fsdp")
    shortage = Shortage(plan=found, rank=0, step=1, cause="exhausted", used_bytes=None, asked_bytes=0, room_bytes=None)
    for attempt in (1, 2, 3):
        limit = corrected(shortage, attempt, profile, cluster, offered()).memory_bytes
        again = Prices(Space(profile, cluster, offered(), replace(request, memory_bytes=limit)))
        assert not again.fits(Candidate.of(found, profile, offered()))


@pytest.mark.parametrize(("graph", "name", "gpus"), [
    (known_models.transformer(4, 512), "t4-pcie-4", 4), (known_models.vgg16(64), "v100-2x8-25g-tcp", 2),
])  # fmt: skip
def test_the_fastest_plan_is_found_again_in_just_the_memory_that_it_needs(
    graph: LayerGraph, name: str, gpus: int
) -> None:
    cluster = presets.load(name)
    profile = on_device(known_models.profile(graph, 2000.0, 64), cluster)
    request = Request(gpus=gpus, global_batch=16, optimizer="adamw", prefer_simple=False, time_limit_s=60)
    free = plan(profile, cluster, offered(), request)[0]
    assert free.strategy == "asa"
    peak = max(free.prediction.memory_bytes_per_rank) - libraries(cluster.device)
    again = plan(profile, cluster, offered(), replace(request, memory_bytes=needed(cluster.device, peak, gpus)))[0]
    assert again.prediction.step_time_s == pytest.approx(free.prediction.step_time_s, rel=1e-9)
    assert again.certificate.lower_bound_s <= free.prediction.step_time_s * (1 + 1e-9)
