"""One pipeline schedule a page. To add one: write its page, name it here; the contract test does the rest."""

from __future__ import annotations

from asa.interfaces.schedule import Schedule
from asa.schedules.gpipe import GPipe
from asa.schedules.layers import Layers
from asa.schedules.one_f_one_b import OneForwardOneBackward

SCHEDULES: tuple[type[Schedule], ...] = (OneForwardOneBackward, GPipe, Layers)


def schedules() -> dict[str, Schedule]:
    """Every schedule there is, by identifier."""
    return {cls.identifier: cls() for cls in SCHEDULES}
