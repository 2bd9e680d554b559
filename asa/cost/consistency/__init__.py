"""The clock of disciplines of consistency: what it takes when workers need not take every step together."""

from __future__ import annotations

from asa.cost.consistency.clock import play
from asa.cost.consistency.played import Machine, Played, Server, Worker

__all__ = ["Machine", "Played", "Server", "Worker", "play"]
