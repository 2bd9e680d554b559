"""Simulates a plan as events on streams, with the planner's prices. It needs no torch."""

from __future__ import annotations

from asa.simulator.plan import simulate
from asa.simulator.timeline import Event, Timeline
from asa.simulator.trace import chrome_trace, save_trace

__all__ = ["Event", "Timeline", "chrome_trace", "save_trace", "simulate"]
