"""Decides: from a profile, a cluster and the strategies offered to the fastest plan, with proof. No torch."""

from __future__ import annotations

from asa.planner.admission import check_request
from asa.planner.decide import plan
from asa.planner.explain import Alternative, ComponentExplanation, Difference, Explanation, Term, explain, why_not
from asa.planner.request import Pin, Request, SolverName, parse_pin, usual_limit
from asa.planner.verify import verify

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
    "usual_limit",
    "verify",
    "why_not",
]
