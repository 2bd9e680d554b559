"""Certificates are attacked by what shares no code with the search, and an attack notices what is wrong."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tables import some

from asa.errors import InfeasibleError
from asa.planner import plan
from asa.strategies import offered

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("attack_script", ROOT / "benchmarks" / "attack.py")
assert SPEC is not None
assert SPEC.loader is not None
attack = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = attack
SPEC.loader.exec_module(attack)

MOVES = 240


def asked(seed: int):
    return attack.drawn(random.Random(seed), small=True)


@pytest.mark.parametrize("seed", some(range(8), range(7)))
def test_no_plan_refutes_a_certificate(seed: int) -> None:
    try:
        case, profile, cluster, request = asked(seed)
        answer = plan(profile, cluster, offered(), request)[0]
    except InfeasibleError:
        pytest.skip("nothing fits")
    found = attack.attack(answer, profile, cluster, offered(), request, moves=MOVES, seed=seed, case=case)
    assert not found.refuted, f"{case}: {found.refuted}"
    assert found.priced > 20


@pytest.mark.parametrize("seed", some([4, 8], [4]))
def test_more_room_is_never_proved_to_be_slower(seed: int) -> None:
    _, profile, cluster, request = asked(seed)
    request = replace(request, time_limit_s=0.15)
    answer = plan(profile, cluster, offered(), request)[0]
    assert not any(attack.laws(profile, cluster, request, answer, random.Random(seed)))


def test_an_attack_notices_a_bound_that_is_too_high() -> None:
    _, profile, cluster, request = asked(1)
    answer = plan(profile, cluster, offered(), request)[0]
    wrong = replace(answer.certificate, lower_bound_s=1.01 * answer.certificate.lower_bound_s, status="feasible")
    found = attack.attack(
        replace(answer, certificate=wrong), profile, cluster, offered(), request, moves=30, seed=0
    )  # fmt: skip
    assert "the bound is" in found.refuted


def test_an_attack_notices_an_answer_that_is_not_optimal() -> None:
    """A whole strategy in place of the optimum: annealing finds what is faster."""
    _, profile, cluster, request = asked(4)
    request = replace(request, gpus=4, memory_bytes=None)
    slow = plan(profile, cluster, offered(), replace(request, strategies=("tensor+ckpt",)))[0]
    best = plan(profile, cluster, offered(), request)[0]
    assert best.prediction.step_time_s < 0.9 * slow.prediction.step_time_s
    claimed = replace(slow.certificate, status="optimal", lower_bound_s=best.certificate.lower_bound_s)
    found = attack.attack(
        replace(slow, certificate=claimed), profile, cluster, offered(), request, moves=600, seed=0
    )  # fmt: skip
    assert "called optimal" in found.refuted


def test_an_attack_notices_a_price_that_is_not_the_plan_s() -> None:
    _, profile, cluster, request = asked(1)
    answer = plan(profile, cluster, offered(), request)[0]
    wrong = replace(answer.prediction, step_time_s=0.9 * answer.prediction.step_time_s)
    found = attack.attack(replace(answer, prediction=wrong), profile, cluster, offered(), request, moves=6, seed=0)
    assert "the answer takes" in found.refuted or "the bound is" in found.refuted


def test_an_attack_notices_a_plan_that_fits_where_nothing_is_said_to_fit() -> None:
    _, profile, cluster, request = asked(4)
    found = attack.attack_refusal(profile, cluster, offered(), request, moves=80, seed=0, case="")
    assert "a plan fits" in found.refuted
    hopeless = replace(request, memory_bytes=2**20)
    assert not attack.attack_refusal(profile, cluster, offered(), hopeless, moves=80, seed=0, case="").refuted


def test_an_attack_notices_a_plan_that_its_certificate_does_not_name_and_what_a_small_space_misses() -> None:
    _, profile, cluster, request = asked(9)
    request = replace(request, global_batch=256)
    answer = plan(profile, cluster, offered(), request)[0]
    narrow = replace(answer.certificate, space="one stage of 1 to 1 ranks; nothing else")
    found = attack.attack(replace(answer, certificate=narrow), profile, cluster, offered(), request, moves=30, seed=0)
    assert "not in the space" in found.refuted
    alone = plan(profile, cluster, offered(), replace(request, strategies=("single",)))[0]
    claimed = replace(alone, certificate=replace(narrow, lower_bound_s=alone.certificate.lower_bound_s))
    found = attack.attack(claimed, profile, cluster, offered(), request, moves=900, seed=0)
    assert not found.refuted
    assert "faster" in found.missed
