"""The adaptive loop: run an epoch, compare what was measured with what was promised, and change the plan if it pays."""

from __future__ import annotations

from asa.scheduler.judge import Policy, describe, judge
from asa.scheduler.loop import Announce, Calibration, Replan, adapt

__all__ = ["Announce", "Calibration", "Policy", "Replan", "adapt", "describe", "judge"]
