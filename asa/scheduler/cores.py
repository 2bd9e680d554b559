"""Groups of processes that share one core. If one of them is idle, the others compute faster."""

from __future__ import annotations

from dataclasses import dataclass

from asa.ir.measurements import Measurements
from asa.scheduler.costs import MIN_STEPS

Groups = tuple[tuple[int, ...], ...]


def groups_of(measured: Measurements) -> Groups:
    """Groups of two or more processes that may use only the same one core."""
    members: dict[int, list[int]] = {}
    for process, rank in enumerate(measured.per_rank):
        if rank.core is not None:
            members.setdefault(rank.core, []).append(process)
    return tuple(sorted(tuple(g) for g in members.values() if len(g) > 1))


@dataclass
class Cores:
    """Groups of processes that share a core. ``current``: groups in the last window; ``established``: groups for which
    the current estimates of ranks were measured, some steps later."""

    current: Groups = ()
    established: Groups = ()
    _steps: int = 0

    def window(self, measured: Measurements, steps: int) -> None:
        """Update the groups from a window of ``steps`` steps."""
        now = groups_of(measured)
        self._steps = self._steps + steps if now == self.current else 0
        self.current = now
        if not now or self._steps >= MIN_STEPS:
            self.established = now
