"""What stages take at least, every component by itself: before anything is formulated.

Each component is run the way that is best in one respect, whatever its neighbours do and whether or not another way is
better in the next: least values of the arrays of a :class:`asa.cost.menu.Menu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asa.cost.menu import Menu
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed
from asa.planner.stage.problem import MS

INF = float("inf")


class Apart:
    """Stages of one width with so many microbatches; ``busy``: ranks of the pipeline they are part of, None for a
    single stage."""

    def __init__(
        self, prices: Prices, allowed: Allowed, width: int, num_microbatches: int, busy: int | None = None
    ) -> None:
        self._count, self._m = len(prices.space.profile.graph), num_microbatches
        overlap = prices.space.cluster.overlap
        self._hidden = max(0.0, overlap.saving) * overlap.compute_slowdown
        self._pricer = prices.pricer(width, num_microbatches, busy)
        self._menu: Menu = prices.menu(self._pricer, allowed)
        samples = [prices.space.samples(layout, num_microbatches) for layout in self._menu.layouts]
        self._offered = self._menu.enough(samples, prices.fewest)

    def _least(self, values: Any, which: Any) -> Any:
        """Per component the least of ``values``, an entry for each of the ways ``which``; infinite without any."""
        found = np.full(self._count, INF)
        np.minimum.at(found, self._menu.component[which], values)
        return found

    def rows(self) -> Any:
        """In ms per component: of one microbatch forward, and forward and back; of all of a step; and of one
        microbatch with what comes once per step. Infinite where it cannot run."""
        which = np.flatnonzero(self._offered & ~self._menu.checkpoint)
        x = self._menu.priced(self._pricer, which)
        both = x.forward + x.backward
        once = x.prompt + x.late + x.once - self._hidden * x.window
        values = (x.forward, both, self._m * both + once, both + once)
        return np.stack([self._least(v, which) for v in values]) * MS
