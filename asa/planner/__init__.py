"""The planner: finds the fastest plan for a profile, a cluster and the strategies offered, with a lower bound. It does
not import torch."""

from __future__ import annotations

from asa.planner.answer.prediction import step_shares, verify
from asa.planner.decide import plan
from asa.planner.questions.explain import (
    Alternative,
    ComponentExplanation,
    Difference,
    Explanation,
    Term,
    explain,
    why_not,
)
from asa.planner.space.baselines import check_request
from asa.planner.space.request import Pin, Request, SolverName, parse_pin, usual_limit

__all__ = [
    "Alternative",
    "ComponentExplanation",
    "Difference",
    "Explanation",
    "Pin",
    "Request",
    "SolverName",
    "Term",
    "check_request",
    "explain",
    "parse_pin",
    "plan",
    "step_shares",
    "usual_limit",
    "verify",
    "why_not",
]
