"""What sharding costs the host of a device that works apart from it.

For every unit that it gathers or scatters, stock ``fully_shard`` runs Python on the host before it can launch the
kernels behind it. The device does not notice while it is still busy with what was launched before. Per component and
pass, with t its compute, f what launching that takes anyway (twice as much in backward, which has twice the kernels)
and L the host's time on its gathers and scatters, the device waits for

    max(0, L - max(0, t - f))

so large components hide it whole, and small ones, which are no faster than they can be launched, pay all of it. What a
neighbour would hide is not counted. t plus the wait never falls as t grows, so slower devices stay slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Launches:
    """Seconds of the host on gathers and scatters in every forward, every backward, and once per step: at the first
    forward, and in the last backward. Numbers, or arrays of them."""

    forward: Any
    backward: Any
    update: Any
    gradient: Any


def awaited(
    launches: Launches, *, forward: Any, backward: Any, floor: float, most: Callable[[Any, Any], Any] = max
) -> Launches:
    """Of ``launches``, what the device waits for: ``forward`` and ``backward`` are the component's compute in one
    microbatch, ``floor`` what of a forward its own launch takes, in seconds. With ``most=numpy.maximum`` of many."""
    ahead, back = most(0.0, forward - floor), most(0.0, backward - 2 * floor)
    in_forward, in_backward = most(0.0, launches.forward - ahead), most(0.0, launches.backward - back)
    return Launches(
        forward=in_forward,
        backward=in_backward,
        update=most(0.0, launches.forward + launches.update - ahead) - in_forward,
        gradient=most(0.0, launches.backward + launches.gradient - back) - in_backward,
    )
