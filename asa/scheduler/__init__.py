"""The adaptive loop: runs, observes, finds what is slow, and changes the plan if that pays."""

from __future__ import annotations

from asa.scheduler.loop import Announce, adapt
from asa.scheduler.model import Model
from asa.scheduler.policy import Policy, describe

__all__ = ["Announce", "Model", "Policy", "adapt", "describe"]
