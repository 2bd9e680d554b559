"""Step times under disciplines of consistency, in which workers need not take every step together."""

from __future__ import annotations

from asa.cost.consistency.clock import play
from asa.cost.consistency.played import Machine, Played, Server, Worker

__all__ = ["Machine", "Played", "Server", "Worker", "play"]
