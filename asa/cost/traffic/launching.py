"""What communication costs the host of a device that works apart from it.

Before the kernels of a gather, a message to the next stage or a collective of tensor parallelism can run, Python on the
host must have launched them: for every unit that stock ``fully_shard`` gathers or scatters, every collective inside a
component or at a boundary, every microbatch that is sent or received. The device does not notice while it is still busy
with what was launched before. Per component and pass, with t its compute, f what launching that takes anyway (twice as
much in backward, which has twice the kernels) and L the host's time on its communication, the device waits for

    max(0, L - max(0, t - f))

so large components hide it whole, and small ones, which are no faster than they can be launched, pay all of it. What
the ends of a component have launched hides behind what its own communication leaves of max(0, t - f), whichever way it
is run: nothing hides twice, and t plus all that is waited for never falls as t grows, so slower devices stay slower.
What a neighbour would hide is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.ir.traffic import Collective, Phase

MOST_UNITS = 2
"""Gathers and scatters of a component's state in one pass, once-per-step ones included."""

MOST_CROSSING = 3
"""Collectives of one boundary in one pass."""


@dataclass
class Launches:
    """Seconds that the host spends on communication in every forward and every backward, and once per step (at the
    first forward, and in the last backward). Numbers or arrays."""

    forward: Any
    backward: Any
    update: Any
    gradient: Any

    def beside(self, forward: Any, backward: Any) -> Launches:
        """A copy with more seconds in every forward and backward."""
        return Launches(self.forward + forward, self.backward + backward, self.update, self.gradient)


def awaited(
    launches: Launches, *, forward: Any, backward: Any, floor: Any, most: Callable[[Any, Any], Any] = max
) -> Launches:
    """The part of ``launches`` that the device waits for, in seconds. ``forward`` and ``backward`` are the compute of
    one microbatch, ``floor`` is the launch time in a forward. ``most`` is ``numpy.maximum`` for arrays."""
    ahead, back = most(0.0, forward - floor), most(0.0, backward - 2 * floor)
    in_forward, in_backward = most(0.0, launches.forward - ahead), most(0.0, launches.backward - back)
    return Launches(
        forward=in_forward,
        backward=in_backward,
        update=most(0.0, launches.forward + launches.update - ahead) - in_forward,
        gradient=most(0.0, launches.backward + launches.gradient - back) - in_backward,
    )


def launched(traffic: Iterable[Collective], phase: Phase) -> int:
    """The number of collectives of ``traffic`` that are launched in ``phase``."""
    return sum(c.phase == phase and c.ranks > 1 and c.bytes > 0 for c in traffic)


class Launching:
    """Seconds that the device waits at the ends of components, where their boundaries are launched.

    ``ahead(layout)`` gives the seconds by which the host is ahead of the device after the forward, and the backward, of
    every component, whatever its own communication took: component x pass. The end where the pass leaves the component
    hides behind that first, then the end where it came in.
    """

    def __init__(self, ahead: Callable[[Any], Any]) -> None:
        self._ahead = ahead
        self._known: dict[Any, Any] = {}
        self.collective_s, self.handover_s = constant("collective_launch_s"), constant("handover_launch_s")
        self._later = MOST_CROSSING * self.collective_s + self.handover_s

    def _all(self, layout: Any) -> Any:
        if layout not in self._known:
            self._known[layout] = self._ahead(layout)
        return self._known[layout]

    def _each(self, indices: Sequence[int], layouts: Sequence[Any]) -> Any:
        """The host's lead: pass x component x layout."""
        return np.stack([self._all(x)[indices] for x in layouts], axis=2).swapaxes(0, 1)

    def between(
        self, indices: Sequence[int], sources: Sequence[Any], targets: Sequence[Any], forward: Any, backward: Any
    ) -> Any:
        """Seconds of waiting in front of several components, between all pairs of layouts with the first of ``sources``
        first: pass x component x pair. ``forward`` and ``backward`` count launches."""
        ahead = self._each([i - 1 for i in indices], sources)[0]
        back = self._each(indices, targets)[1]
        return (
            np.maximum(0.0, forward * self.collective_s - np.repeat(ahead, len(targets), axis=1)),
            np.maximum(0.0, backward * self.collective_s - np.tile(back, len(sources))),
        )

    def entered(self, indices: Sequence[int], layouts: Sequence[Any], forward: Any, backward: Any) -> Any:
        """Seconds of waiting where stages begin with components in each of these layouts: pass x component x layout. A
        microbatch is received, its gradient is sent."""
        ahead, own, message = self._each(indices, layouts), self.collective_s, self.handover_s
        return (
            np.maximum(0.0, forward * own + message - np.maximum(0.0, ahead[0] - self._later)),
            np.maximum(0.0, backward * own + message - ahead[1]),
        )

    def left(self, indices: Sequence[int], layouts: Sequence[Any], forward: Any, backward: Any, *, sent: Any) -> Any:
        """Seconds of waiting where stages end with components, as for :meth:`entered`. ``sent``: to another stage,
        component x 1."""
        ahead, own, message = self._each(indices, layouts), self.collective_s, sent * self.handover_s
        return (
            np.maximum(0.0, forward * own + message - ahead[0]),
            np.maximum(0.0, backward * own + message - np.maximum(0.0, ahead[1] - self._later)),
        )
