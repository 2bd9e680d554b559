"""Which processes have one core in common: they take turns on it, and one that idles leaves its turns to the others."""

from __future__ import annotations

from dataclasses import dataclass

from asa.ir.measurements import Measurements
from asa.scheduler.costs import MIN_STEPS

Groups = tuple[tuple[int, ...], ...]


def groups_of(measured: Measurements) -> Groups:
    """Processes that may use one core only, by core, where there are several of them."""
    found: dict[int, list[int]] = {}
    for process, rank in enumerate(measured.per_rank):
        if rank.core is not None:
            found.setdefault(rank.core, []).append(process)
    return tuple(sorted(tuple(g) for g in found.values() if len(g) > 1))


@dataclass
class Cores:
    """``seen``: the groups in the last window; ``believed``: those that figures of ranks were measured under, which is
    some steps later."""

    seen: Groups = ()
    believed: Groups = ()
    _steps: int = 0

    def window(self, measured: Measurements, steps: int) -> None:
        """A window of ``steps``."""
        now = groups_of(measured)
        self._steps = self._steps + steps if now == self.seen else 0
        self.seen = now
        if not now or self._steps >= MIN_STEPS:
            self.believed = now
