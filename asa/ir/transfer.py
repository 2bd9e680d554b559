"""Transfers between pipeline stages: which rank sends which rows of a microbatch to which rank.

At the end of a stage, the output of its last component is whole (:func:`whole`: tensor degree 1) and cut into as many
batch shards as that component's data degree. Every rank of a shard holds it. The next stage needs it cut by the data
degree of its first component, again on every rank of a shard. Each target rank receives the rows that it needs, and no
others: one message from every source shard that has some of them. Of the ranks of that shard, the one that has sent
fewest rows so far sends it.

Gradients are sent back by the same rule with the two sides exchanged. They are scaled as at a boundary
(:mod:`asa.ir.layout`), because each rank's gradients are those of the mean over its own shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace

from asa.ir.codec import noun
from asa.ir.layout import Layout
from asa.ir.plan import Plan

UNDER_WAY = 2
"""Number of gradients that may wait to be received by the previous stage. That stage never waits for this one, so no
deadlock arises."""


@noun
class Message:
    """Rows ``start`` to ``stop`` of the microbatch, from rank ``source`` to rank ``target``."""

    source: int
    target: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@lru_cache(maxsize=1024)
def transfers(
    source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...], rows: int
) -> tuple[Message, ...]:
    """All messages of one microbatch of ``rows`` rows, in the order in which each rank sends and receives its own.

    The ranks of a stage are in the order of its layouts. Empty shards send and receive nothing.

    >>> two, one = Layout(width=2, data=2, tensor=1), Layout(width=1, data=1, tensor=1)
    >>> [(m.source, m.target, m.start, m.stop) for m in transfers(two, (0, 1), one, (2,), 8)]
    [(0, 2, 0, 4), (1, 2, 4, 8)]
    """
    return tuple(
        Message(source=source_ranks[sender], target=target_ranks[receiver], start=low, stop=high)
        for sender, receiver, low, high in messages(source, target, rows)
    )


def messages(source: Layout, target: Layout, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Messages as (sender's index in its stage, receiver's index in its stage, first row, one past the last)."""
    shards = [source.rows(rows, i) for i in range(source.data)]
    ends = [stop for _, stop in shards]
    # Every rank holds one shard, so of each shard it is enough to know who of its holders has sent fewest rows.
    holders = [[(0, rank) for rank in range(i * source.inner, (i + 1) * source.inner)] for i in range(source.data)]
    for shard in range(target.data):
        first, last = target.rows(rows, shard)
        for receiver in range(shard * target.inner, (shard + 1) * target.inner):
            for i in range(bisect_right(ends, first), source.data):
                start, stop = shards[i]
                low, high = max(first, start), min(last, stop)
                if start >= last:
                    break
                if low >= high:
                    continue
                rows_sent, sender = holders[i][0]
                heapreplace(holders[i], (rows_sent + high - low, sender))
                yield sender, receiver, low, high


@noun
class Hop:
    """The transfer from one stage to the next. ``source`` and ``target`` are the layouts of the components on either
    side, with the ranks of the two stages.
    """

    source: Layout
    source_ranks: tuple[int, ...]
    target: Layout
    target_ranks: tuple[int, ...]

    @property
    def gradient_scale(self) -> float:
        """Factor on gradients in backward."""
        return self.source.data / self.target.data

    def forward(self, rows: int) -> tuple[Message, ...]:
        """Messages with activations."""
        return transfers(self.source, self.source_ranks, self.target, self.target_ranks, rows)

    def backward(self, rows: int) -> tuple[Message, ...]:
        """Messages with gradients."""
        return transfers(self.target, self.target_ranks, self.source, self.source_ranks, rows)


def whole(layout: Layout) -> Layout:
    """``layout`` with the same batch shards and nothing split: the layout at both ends of a stage."""
    return replace(layout, tensor=1, sequence=False)


def hops(plan: Plan) -> tuple[Hop, ...]:
    """The transfers between the stages of ``plan``, one fewer than stages."""
    layouts = plan.layouts()
    return tuple(
        Hop(
            source=layouts[i],
            source_ranks=plan.stages[plan.components[i].stage].ranks,
            target=layouts[i + 1],
            target_ranks=plan.stages[plan.components[i + 1].stage].ranks,
        )
        for i in range(len(layouts) - 1)
        if plan.components[i].stage != plan.components[i + 1].stage
    )
