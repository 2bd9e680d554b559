"""Why this plan, and why not another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import fake_strategies
import known_models
import nouns
import pytest

from asa import strategies
from asa.cost.machine import presets
from asa.errors import InvalidInputError, UsageError
from asa.ir.plan import Plan
from asa.ir.units import MIB
from asa.planner import Request, explain, plan, why_not
from asa.report.text.explain import communicates, computes

FULL = fake_strategies.FULL
PROFILE = known_models.profile(known_models.vgg16(32), 4000.0, 64)
CLUSTER = presets.load("v100-dgx1-8")


@cache
def best() -> Plan:
    """Planned once, and only where these tests run."""
    return plan(PROFILE, CLUSTER, FULL, Request(gpus=8, global_batch=256, prefer_simple=False))[0]


def test_components_add_up_to_the_prediction():
    found = explain(best(), PROFILE, CLUSTER, FULL)
    compute = sum(c.forward_s + c.backward_s for c in found.components)
    moved = sum(c.inside_s + c.boundary_s + c.sync_s for c in found.components)
    update = sum(c.update_s for c in found.components)
    saved = CLUSTER.overlap.saving * found.overlap_s
    assert saved > 0
    assert compute + moved + update - saved == pytest.approx(best().prediction.step_time_s)
    assert [c.name for c in found.components] == [c.name for c in best().components]
    assert found.peak_bytes <= found.capacity_bytes


def test_no_single_change_improves_an_optimal_plan():
    assert best().certificate.status == "optimal"
    for c in explain(best(), PROFILE, CLUSTER, FULL).components:
        assert c.alternative is not None
        assert (c.alternative.data, c.alternative.tensor) != (c.data, c.tensor)
        assert c.alternative.extra_s >= -1e-12


@pytest.mark.parametrize("other", ["ddp", "single", "tensor", "fsdp", "hybrid", "classifier=replicate@8"])
def test_the_difference_to_another_strategy_is_a_sum_of_terms(other):
    found = why_not(best(), PROFILE, CLUSTER, FULL, other)
    assert found.other_s is not None
    assert found.other_s >= found.plan_s * (1 - 1e-9)
    assert sum(t.plan_s for t in found.terms) == pytest.approx(found.plan_s)
    assert sum(t.other_s for t in found.terms) == pytest.approx(found.other_s)
    assert found.changed


def test_a_plan_that_is_the_slower_one_says_why_it_is_the_answer():
    whole = plan(PROFILE, CLUSTER, FULL, Request(gpus=8, global_batch=256, strategies=("ddp",)))[0]
    last = best().components[-1]
    found = why_not(whole, PROFILE, CLUSTER, FULL, f"classifier=tensor@{last.tensor.degree}")
    assert found.other_s is not None
    assert found.other_s < found.plan_s
    assert f"{100 * (1 - found.other_s / found.plan_s):.2g} % faster than this plan" in found.remark
    assert not why_not(best(), PROFILE, CLUSTER, FULL, "ddp").remark


def test_what_was_chosen_anyway_differs_in_nothing():
    last = best().components[-1]
    found = why_not(best(), PROFILE, CLUSTER, FULL, f"classifier=tensor@{last.tensor.degree}")
    assert last.tensor.degree > 1
    assert found.other_s == pytest.approx(found.plan_s)


def test_a_plan_is_explained_in_the_memory_it_was_planned_with():
    found = plan(PROFILE, CLUSTER, FULL, Request(gpus=8, global_batch=256, memory_bytes=4000 * MIB))[0]
    assert explain(found, PROFILE, CLUSTER, FULL).capacity_bytes <= 4000 * MIB
    assert explain(best(), PROFILE, CLUSTER, FULL).capacity_bytes > 4000 * MIB


def test_what_cannot_be_run_says_why():
    found = why_not(best(), PROFILE, CLUSTER, FULL, "features.0=replicate@5")
    assert found.other_s is not None, "five of eight devices can"
    found = why_not(best(), PROFILE, CLUSTER, FULL, "features.0=replicate@9")
    assert (found.other_s, found.fits) == (None, False)
    assert found.why_not
    lean = why_not(best(), PROFILE, CLUSTER, FULL, "ddp", memory_bytes=2200 * MIB)
    assert not lean.fits
    assert "GiB" in lean.why_not


def test_every_strategy_of_the_table_costs_there_what_it_costs_here():
    request = Request(gpus=8, global_batch=256, memory_bytes=4000 * MIB, strategies=("tensor",))
    found = plan(PROFILE, CLUSTER, FULL, request)[0]
    for b in found.baselines:
        other = why_not(found, PROFILE, CLUSTER, FULL, b.name, memory_bytes=4000 * MIB)
        assert (other.other_s, other.fits) == (b.step_time_s, b.fits), b.name
        assert sum(t.other_s for t in other.terms) == pytest.approx(other.other_s or 0.0)
        assert b.fits or other.why_not


def test_unknown_rivals_and_foreign_profiles_are_refused():
    with pytest.raises(UsageError, match="no strategy"):
        why_not(best(), PROFILE, CLUSTER, FULL, "magic")
    with pytest.raises(UsageError, match="matches no component"):
        why_not(best(), PROFILE, CLUSTER, FULL, "layer9=tensor@2")
    with pytest.raises(InvalidInputError, match="components"):
        explain(best(), nouns.profile(), nouns.cluster(2), FULL)


def test_tight_memory_is_named_as_what_binds():
    profile, cluster = nouns.profile(), nouns.cluster(2)
    free = plan(profile, cluster, fake_strategies.PLAIN, Request(gpus=2, global_batch=8))[0]
    peak = max(free.prediction.memory_bytes_per_rank)
    assert explain(free, profile, cluster, fake_strategies.PLAIN, memory_bytes=int(1.01 * peak)).binding == "memory"
    assert explain(free, profile, cluster, fake_strategies.PLAIN).binding != "memory"
    slow = replace(cluster, levels=tuple(
        replace(level, tables=tuple(replace(t, points=tuple((s, 50 * v) for s, v in t.points)) for t in level.tables))
        for level in cluster.levels
    ))  # fmt: skip
    ddp = plan(profile, slow, fake_strategies.PLAIN, Request(gpus=2, global_batch=8, strategies=("ddp",)))[0]
    assert explain(ddp, profile, slow, fake_strategies.PLAIN).binding == "communication"


def test_weights_that_are_gathered_after_the_update_count_as_communication():
    found = plan(PROFILE, CLUSTER, FULL, Request(gpus=8, global_batch=256, strategies=("zero1",)))[0]
    causes = explain(found, PROFILE, CLUSTER, FULL)
    assert sum(computes(c) for c in causes.components) == pytest.approx(found.prediction.compute_s)
    moved = sum(communicates(c) for c in causes.components)
    p = found.prediction
    assert moved == pytest.approx(p.exposed_communication_s + p.hidden_communication_s)


def test_a_plan_that_was_made_heavier_is_explained_so():
    found = plan(PROFILE, CLUSTER, FULL, Request(gpus=8, global_batch=256, strategies=("ddp",)))[0]
    plain = explain(found, PROFILE, CLUSTER, FULL).peak_bytes
    assert explain(replace(found, memory_scale=1.5), PROFILE, CLUSTER, FULL).peak_bytes > plain


def test_links_that_a_pipeline_waits_for_are_what_binds():
    slow = replace(CLUSTER, levels=tuple(
        replace(level, tables=tuple(replace(t, points=tuple((s, 40 * v) for s, v in t.points)) for t in level.tables))
        for level in CLUSTER.levels
    ))  # fmt: skip
    asked = Request(gpus=8, global_batch=256, strategies=("1f1b",))
    for cluster, binding in ((CLUSTER, "compute"), (slow, "communication")):
        found = plan(PROFILE, cluster, strategies.offered(), asked)[0]
        assert explain(found, PROFILE, cluster, strategies.offered()).binding == binding
