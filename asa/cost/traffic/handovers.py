"""Seconds to send a microbatch from one stage of a pipeline to the next."""

from __future__ import annotations

from math import gcd

from asa.cost.shards import sending
from asa.cost.traffic.collectives import Links
from asa.ir.layout import Layout, largest_shard


class Handovers:
    """Transfers of ``microbatch`` samples between stages over ``links``, each priced once."""

    def __init__(self, links: Links, microbatch: int) -> None:
        self._links, self._microbatch = links, microbatch
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        self._sent: dict[tuple[object, ...], tuple[int, tuple[tuple[int, ...], ...]]] = {}

    def seconds(self, sizes: tuple[float, ...], source: Layout, target: Layout, offset: int) -> list[float]:
        """Seconds for each of ``sizes`` (bytes per sample), to or from a stage that begins on rank ``offset``: those of
        the busiest rank. The messages are those of :mod:`asa.ir.transfer`."""
        flows, ranks = self._messages(source, target)
        key = (sizes, flows, ranks, offset)
        if key not in self._seconds:
            self._seconds[key] = [
                max((sum(self._links.handover(r * size, offset, flows) for r in rows) for rows in ranks), default=0.0)
                for size in sizes
            ]
        return self._seconds[key]

    def _messages(self, source: Layout, target: Layout) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """The number of flows and the messages of a transfer, as :func:`asa.cost.shards.sending` returns them."""
        key = (source.width, source.data, source.weights, target.width, target.data, target.weights)
        messages = self._sent.get(key)
        if messages is None:
            # Even cuts are nested: the transfer is `alike` equal transfers between fewer shards.
            copies = 1 if source.weights or target.weights else gcd(source.data, target.data)
            ends = (
                Layout(width=x.width // copies, data=x.data // copies, tensor=1, weights=x.weights)
                for x in (source, target)
            )
            flows, ranks = sending(*ends, largest_shard(self._microbatch, copies))
            messages = self._sent[key] = (flows * copies, ranks)
        return messages
