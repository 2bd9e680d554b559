"""Seconds that an asynchronous device waits until its host has launched communication.

Python on the host launches the kernels of every unit that stock ``fully_shard`` gathers or scatters, every collective
inside a component or at a boundary, and every microbatch that is sent or received. The device does not wait while it
still computes kernels that were launched earlier. Per component and pass the device waits for

    max(0, L - max(0, t - f))

    t   seconds of the component's compute
    f   seconds to launch this compute (twice as many in backward, which has twice the kernels)
    L   seconds of the host to launch the component's communication

So a large component hides all of L, and a component whose compute is launch-bound pays all of it. Launches at the
component's boundaries hide behind the least rest of max(0, t - f) that its own communication leaves under any strategy.
So nothing is hidden twice, and t plus the waiting never falls as t grows: a slower device never gives a faster step.
Time that a neighbour could hide is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.ir.traffic import Collective, Phase

MOST_UNITS = 2
"""The most gathers and scatters of a component's state in one pass, including those once per step."""

MOST_CROSSING = 3
"""The most collectives of one boundary in one pass."""


@dataclass
class Launches:
    """Seconds of the host to launch communication: in every ``forward`` and ``backward``, and once per step in the
    first forward (``update``) and in the last backward (``gradient``). Numbers or arrays."""

    forward: Any
    backward: Any
    update: Any
    gradient: Any

    def plus(self, forward: Any, backward: Any) -> Launches:
        """A copy with these seconds added to every forward and backward."""
        return Launches(self.forward + forward, self.backward + backward, self.update, self.gradient)


def awaited(
    launches: Launches, *, forward: Any, backward: Any, floor: Any, greater: Callable[[Any, Any], Any] = max
) -> Launches:
    """The part of ``launches`` that the device waits for, in seconds. ``forward`` and ``backward``: compute of one
    microbatch (t); ``floor``: launch of a forward's compute (f). ``greater``: ``numpy.maximum`` for arrays."""
    ahead, back = greater(0.0, forward - floor), greater(0.0, backward - 2 * floor)
    in_forward, in_backward = greater(0.0, launches.forward - ahead), greater(0.0, launches.backward - back)
    return Launches(
        forward=in_forward,
        backward=in_backward,
        update=greater(0.0, launches.forward + launches.update - ahead) - in_forward,
        gradient=greater(0.0, launches.backward + launches.gradient - back) - in_backward,
    )


def launched(traffic: Iterable[Collective], phase: Phase) -> int:
    """The number of collectives of ``traffic`` that are launched in ``phase``."""
    return sum(c.phase == phase and c.ranks > 1 and c.bytes > 0 for c in traffic)


class Launching:
    """Seconds that the device waits for the launch of boundaries.

    ``host_lead(layout)``: seconds by which the host is at least ahead of the device after the forward and the backward
    of each component, shape (component, pass). They first hide launches of the boundary at which a pass leaves the
    component; the rest hides those of the boundary at which it entered."""

    def __init__(self, host_lead: Callable[[Any], Any]) -> None:
        self._host_lead = host_lead
        self._leads: dict[Any, Any] = {}
        self.collective_s, self.handover_s = constant("collective_launch_s"), constant("handover_launch_s")
        self._crossing_s = MOST_CROSSING * self.collective_s + self.handover_s

    def _all(self, layout: Any) -> Any:
        if layout not in self._leads:
            self._leads[layout] = self._host_lead(layout)
        return self._leads[layout]

    def _leads_of(self, indices: Sequence[int], layouts: Sequence[Any]) -> Any:
        """Seconds by which the host is ahead: shape (pass, component, layout)."""
        return np.stack([self._all(x)[indices] for x in layouts], axis=2).swapaxes(0, 1)

    def at_boundaries(
        self, indices: Sequence[int], sources: Sequence[Any], targets: Sequence[Any], forward: Any, backward: Any
    ) -> Any:
        """Seconds of waiting at the boundaries in front of ``indices``, for all pairs of layouts (those with the first
        source come first): shape (pass, component, pair). ``forward`` and ``backward``: numbers of collectives."""
        ahead = self._leads_of([i - 1 for i in indices], sources)[0]
        back = self._leads_of(indices, targets)[1]
        return (
            np.maximum(0.0, forward * self.collective_s - np.repeat(ahead, len(targets), axis=1)),
            np.maximum(0.0, backward * self.collective_s - np.tile(back, len(sources))),
        )

    def at_inlets(self, indices: Sequence[int], layouts: Sequence[Any], forward: Any, backward: Any) -> Any:
        """Seconds of waiting at the start of stages that begin with ``indices``: shape (pass, component, layout). A
        microbatch is received, and its gradient is sent."""
        leads, each_s, message = self._leads_of(indices, layouts), self.collective_s, self.handover_s
        return (
            np.maximum(0.0, forward * each_s + message - np.maximum(0.0, leads[0] - self._crossing_s)),
            np.maximum(0.0, backward * each_s + message - leads[1]),
        )

    def at_outlets(
        self, indices: Sequence[int], layouts: Sequence[Any], forward: Any, backward: Any, *, sent: Any
    ) -> Any:
        """Seconds of waiting at the end of stages that end with ``indices``: shape (pass, component, layout). ``sent``:
        whether the output goes to another stage, shape (component, 1)."""
        leads, each_s, message = self._leads_of(indices, layouts), self.collective_s, sent * self.handover_s
        return (
            np.maximum(0.0, forward * each_s + message - leads[0]),
            np.maximum(0.0, backward * each_s + message - np.maximum(0.0, leads[1] - self._crossing_s)),
        )
