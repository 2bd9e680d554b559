"""A certificate is held to account by plans that the search never saw."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import fake_strategies
import known_models
import pytest

from asa.cost.machine import presets
from asa.ir.plan import Plan
from asa.planner import Request, plan
from asa.planner.budget import USUAL
from asa.schedules import schedules
from benchmarks.certificate import Evaluator, check, moves

STAGED = replace(fake_strategies.FULL, schedules=schedules(), checkpoint=True)
PATIENT = replace(USUAL, patience_s=60.0)
"""A busy machine gets the same answers with it."""
CASES = [
    ("resnet50", "v100-dgx1-8", None),
    ("resnet50", "t4-8x1-25g-tcp", None),
    ("vgg16", "3090-pcie-8", None),
    ("vit", "v100-dgx1-8", 0.6),
]
MODELS = {
    "resnet50": known_models.resnet50,
    "vgg16": lambda: known_models.vgg16(64),
    "vit": lambda: known_models.transformer(4),
}


@cache
def solved(model: str, cluster: str, share: float | None) -> tuple[Plan, Request, tuple[object, ...]]:
    """On 4 devices; ``share``: memory over what the plan without a limit takes."""
    profile, links = known_models.profile(MODELS[model](), 500.0, 64), presets.load(cluster)
    request = Request(gpus=4, global_batch=32, prefer_simple=False, time_limit_s=12.0)
    found = plan(profile, links, STAGED, request, budget=PATIENT)[0]
    if share is not None:
        held = max(found.prediction.memory_bytes_per_rank)
        request = replace(request, memory_bytes=int(share * held) + 2 * 2**30)
        found = plan(profile, links, STAGED, request, budget=PATIENT)[0]
    return found, request, (profile, links, STAGED)


@pytest.mark.parametrize(("model", "cluster", "share"), CASES)
def test_no_plan_beside_the_answer_breaks_its_certificate(model, cluster, share):
    found, request, given = solved(model, cluster, share)
    trial = check(found, *given, request, tries=500)  # type: ignore[arg-type]
    assert trial.tried > 100
    assert not trial.refuted
    assert trial.fastest_s >= found.certificate.lower_bound_s * (1 - 1e-9)
    assert 0 < trial.floor_s <= found.certificate.lower_bound_s * (1 + 1e-9)


def test_a_certificate_that_claims_too_much_is_refuted():
    found, request, given = solved("resnet50", "v100-dgx1-8", None)
    evaluator = Evaluator(found, *given, request)  # type: ignore[arg-type]
    slower = next(
        c
        for c in moves(evaluator, random.Random(1), 500)
        if (t := evaluator.seconds(c)) is not None and t > 1.05 * found.prediction.step_time_s
    )
    seconds = evaluator.seconds(slower)
    assert seconds is not None
    bold = replace(
        found,
        prediction=replace(found.prediction, step_time_s=seconds, step_time_low_s=0.0, step_time_high_s=1e3),
        certificate=replace(found.certificate, lower_bound_s=seconds, status="optimal"),
    )
    assert check(bold, *given, request, tries=300).refuted  # type: ignore[arg-type]
    shy = replace(found, certificate=replace(found.certificate, status="feasible", lower_bound_s=0.0))
    assert not check(shy, *given, request, tries=300).refuted  # type: ignore[arg-type]
    wrong = replace(shy, certificate=replace(shy.certificate, lower_bound_s=1.01 * found.prediction.step_time_s))
    assert check(wrong, *given, request, tries=10).refuted  # type: ignore[arg-type]


def test_moves_reach_other_ways_cuts_widths_and_microbatches():
    found, request, given = solved("resnet50", "t4-8x1-25g-tcp", None)
    evaluator = Evaluator(found, *given, request)  # type: ignore[arg-type]
    made = list(moves(evaluator, random.Random(2), 1500))
    assert len({c.starts for c in made}) > 5
    assert len({c.widths for c in made}) > 3
    assert len({c.num_microbatches for c in made}) > 1
    assert len({c.key for c in made}) > 500
    for c in made:
        assert all(w in evaluator.ways(i, c.width(i), c.num_microbatches) for i, w in enumerate(c.ways))
