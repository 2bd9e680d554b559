"""First plans of one stage.

Where memory binds, before anything is bounded: whole strategies that fit may be far off. Of all ranks, in as few
microbatches as leave room for something faster than the best plan known. The prices of memory and overlap, which the
search would look for anyway, come upon choices that fit; the first one found is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from asa.planner import clock
from asa.planner.stage.singles import Single

_MORE = 5_000
"""Ways that are priced of more than one microbatch, all together, before the last of them is formulated: a dozen
milliseconds for each thousand."""


def first_plan(alone: Sequence[Single], best: float, ends: float) -> float:
    """Ms of a first plan among ``alone``, which keep it; infinite where none below ``best`` ms was found.

    One microbatch is looked at whatever the time, more of them until ``ends``.
    """
    widest = max((x.width for x in alone), default=0)
    own = sorted((x for x in alone if x.width == widest), key=lambda x: x.num_microbatches)
    priced = 0
    for single in own:
        several = single.num_microbatches > 1
        if single.bound >= best or (several and clock.now() > ends) or not single.crowded or single.long:
            break
        least = single.least
        priced += single.ways if several else 0
        if priced > _MORE:
            break
        if least < best:
            single.begin(best)
            if single.value < best:
                return single.value
        elif least < float("inf"):  # more microbatches are in the space only if it is proved that this many do not fit
            break
    return float("inf")
