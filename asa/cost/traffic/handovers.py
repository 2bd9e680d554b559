"""Seconds to send a microbatch from one stage of a pipeline to the next."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from asa.cost.traffic.collectives import Links
from asa.ir.layout import Layout, largest_shard
from asa.ir.transfer import messages


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
        """The number of flows and the messages of a transfer, as :func:`sending` returns them."""
        key = (source.width, source.data, source.weights, target.width, target.data, target.weights)
        sent = self._sent.get(key)
        if sent is None:
            # Even cuts are nested: the transfer is `alike` equal transfers between fewer shards.
            copies = 1 if source.weights or target.weights else gcd(source.data, target.data)
            ends = (
                Layout(width=x.width // copies, data=x.data // copies, tensor=1, weights=x.weights)
                for x in (source, target)
            )
            flows, ranks = sending(*ends, largest_shard(self._microbatch, copies))
            sent = self._sent[key] = (flows * copies, ranks)
        return sent


@lru_cache(maxsize=65536)
def sending(source: Layout, target: Layout, rows: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The number of concurrent flows of a transfer of ``rows`` rows between stages, and the messages (in rows) of each
    rank that may be the busiest sender or receiver."""
    messages_of: dict[int, list[int]] = {}
    senders, receivers = set(), set()
    for sender, receiver, low, high in messages(source, target, rows):
        senders.add(sender)
        receivers.add(receiver)
        for rank in (sender, source.width + receiver):
            messages_of.setdefault(rank, []).append(high - low)
    return min(len(senders), len(receivers)), _busiest({tuple(sorted(sizes)) for sizes in messages_of.values()})


def _busiest(ranks: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The ranks that no other rank dominates, that is, has at least as many messages, each at least as large."""
    undominated: list[tuple[int, ...]] = []
    for sizes in sorted(ranks, key=lambda x: (len(x), x[::-1]), reverse=True):
        if not any(all(a <= b for a, b in zip(sizes[::-1], other[::-1], strict=False)) for other in undominated):
            undominated.append(sizes)
    return tuple(undominated)
