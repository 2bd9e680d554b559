"""Re-planning during a run: train, observe, find slow ranks and links, and change the plan if that saves time."""

from __future__ import annotations

from asa.scheduler.loop import Announce, Loop, adapt
from asa.scheduler.model import Model
from asa.scheduler.policy import Policy, describe

__all__ = ["Announce", "Loop", "Model", "Policy", "adapt", "describe"]
