"""``verify`` of many plans of one model: what they are held against is computed once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

from torch import nn

from asa.executor.measuring import equivalence
from asa.executor.measuring.equivalence import OneDevice, default_samples, on_one_device, one_device, verify
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from planner_tests import small_models

STEPS = 3
"""Momentum, moments and running statistics have all been used by then, and what goes wrong in a step goes wrong in the
first. ``test_equivalence.py`` takes the five of a user's ``verify``."""


def verified(
    plan: Plan, name: str, *, even: bool = False, samples: int | None = None, steps: int = STEPS
) -> Equivalence:
    """:func:`verify` of ``plan`` for the small model of a name.

    The loop that trains is not compared: ``test_verify_training.py`` and plans drawn at random do that.
    """
    count = samples or default_samples(plan)
    with patch.object(equivalence, "STEPS", steps):
        reference = _one_device(_training_alone(plan, count), name, even, count, steps)
        return verify(
            plan, _build(name, even), offered(), samples=samples, timeout_s=60, reference=reference, trained=False
        )  # fmt: skip


def _build(name: str, even: bool) -> Callable[[], nn.Module]:
    return lambda: small_models.build(name, even=even)


def _training_alone(plan: Plan, samples: int) -> Plan:
    """The plan of one device, without what does not reach its numbers."""
    prediction = replace(plan.prediction, memory_bytes_per_rank=(1,))
    return replace(on_one_device(plan, samples), gpus=1, global_batch=samples, prediction=prediction)


@cache
def _one_device(plan: Plan, name: str, even: bool, samples: int, steps: int) -> OneDevice:
    """On one device in so many steps."""
    assert steps == equivalence.STEPS
    return run_ranks(1, one_device, plan, _build(name, even), offered(), "cpu", samples, threads=1, timeout_s=60)[0]
