"""``verify`` of many plans of one model: what they are held against is computed once for all of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

from asa.executor.measuring import equivalence
from asa.executor.measuring.equivalence import OneDevice, default_samples, on_one_device, one_device, verify
from asa.executor.measuring.model_copies import ModelCopies
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.tracing import TracedModel
from planner_tests.hand_plans import copy_of, model_of

STEPS = 3
"""Momentum, moments and running statistics have all been used by then, and what goes wrong in a step goes wrong in the
first. A user's ``verify`` makes five."""


def verified(
    plan: Plan, name: str, *, even: bool = False, samples: int | None = None, steps: int = STEPS
) -> Equivalence:
    """:func:`verify` of ``plan`` for the small model of a name.

    The loop that trains is not compared, and ranks get copies of one trace: ``test_verify_training.py`` and plans drawn
    at random compare the one and trace anew.
    """
    model, count = model_of(name, even=even), samples or default_samples(plan)
    with patch.object(equivalence, "STEPS", steps):
        reference = _one_device(_training_alone(plan, count), name, even, count, steps)
    return of_copies(plan, model, samples=samples, steps=steps, reference=reference)


def of_copies(
    plan: Plan, model: TracedModel, *, samples: int | None = None, steps: int = STEPS,
    reference: OneDevice | None = None,
) -> Equivalence:  # fmt: skip
    """:func:`verify` of ``plan`` with copies of a model that was traced before ranks are forked. Why one device may
    differ from itself is not asked, and neither is the loop that trains."""
    with patch.object(equivalence, "STEPS", steps), patch.object(equivalence, "reasons", lambda *_: ()):
        return verify(
            plan, lambda: copy.deepcopy(model), offered(), samples=samples, timeout_s=120, reference=reference,
            trained=False,
        )  # fmt: skip


def _training_alone(plan: Plan, samples: int) -> Plan:
    """The plan of one device, without what does not reach its numbers."""
    prediction = replace(plan.prediction, memory_bytes_per_rank=(1,))
    return replace(on_one_device(plan, samples), gpus=1, global_batch=samples, prediction=prediction)


@cache
def _one_device(plan: Plan, name: str, even: bool, samples: int, steps: int) -> OneDevice:
    """On one device in so many steps."""
    assert steps == equivalence.STEPS
    copies = ModelCopies(plan, partial(copy_of, name, even=even))
    return run_ranks(1, one_device, plan, copies, offered(), "cpu", samples, threads=1, timeout_s=120)[0]
