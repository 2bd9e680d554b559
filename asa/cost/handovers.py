"""What it takes to hand a microbatch from one stage of a pipeline to the next."""

from __future__ import annotations

from math import gcd

from asa.cost.collectives import Links
from asa.cost.shards import sending
from asa.ir.layout import Layout, largest_shard


class Handovers:
    """Of microbatches of ``microbatch`` samples over ``links``; each is priced once."""

    def __init__(self, links: Links, microbatch: int) -> None:
        self._links, self._microbatch = links, microbatch
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, size: float, source: Layout, target: Layout, offset: int) -> float:
        """Of ``size`` bytes of a sample, to a stage that begins on rank ``offset`` (or back from it). The busiest rank
        decides (:mod:`asa.ir.transfer`)."""
        weights = (source.weights, target.weights)
        key = (size, source.width, source.data, target.width, target.data, offset, *weights)
        if key not in self._known:
            # Even cuts are nested, so what happens is the same thing as often as both sides have shards.
            alike = 1 if any(weights) else gcd(source.data, target.data)
            ends = (
                Layout(width=x.width // alike, data=x.data // alike, tensor=1, weights=x.weights)
                for x in (source, target)
            )
            flows, ranks = sending(*ends, largest_shard(self._microbatch, alike))
            flows *= alike
            self._known[key] = max(
                (sum(self._links.handover(r * size, offset, flows) for r in rows) for rows in ranks), default=0.0
            )
        return self._known[key]
