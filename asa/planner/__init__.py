"""Decides: from a profile, a cluster and the strategies offered to the fastest plan, with proof. No torch."""

from __future__ import annotations

from asa.planner.decide import plan
from asa.planner.request import Pin, Request, SolverName, parse_pin
from asa.planner.verify import verify

__all__ = ["Pin", "Request", "SolverName", "parse_pin", "plan", "verify"]
