"""Pipeline schedules, one per file. To add one, write its file and list it here; the contract test checks it."""

from __future__ import annotations

from asa.interfaces.schedule import Schedule
from asa.schedules.gpipe import GPipe
from asa.schedules.layers import Layers
from asa.schedules.one_f_one_b import OneForwardOneBackward

SCHEDULES: tuple[type[Schedule], ...] = (OneForwardOneBackward, GPipe, Layers)


def schedules() -> dict[str, Schedule]:
    """All schedules, by identifier."""
    return {cls.identifier: cls() for cls in SCHEDULES}
