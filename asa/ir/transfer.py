"""The law of transfers between pipeline stages: which rank sends which rows of a microbatch to which rank.

Where a stage ends, its last component's output is whole (:func:`whole`: tensor degree 1) and cut into as many batch
shards as that component's data degree; every rank of a shard holds it. The next stage reads it cut by its first
component's data degree, again on every rank of a shard. Each target rank receives the rows it needs, and no others:
from every source shard that has some, one message, sent by whichever of the ranks that hold the shard has sent
fewest rows so far. Gradients go back by the same law with the two sides exchanged, and change scale as in a boundary
(:mod:`asa.ir.layout`): each rank's are those of the mean over its own shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace

from asa.ir.codec import noun
from asa.ir.layout import Boundary, Layout
from asa.ir.plan import Plan

UNDER_WAY = 2
"""Gradients that may wait for the stage before to take them. It never waits for this one to go on, so none is stuck."""


@noun
class Message:
    """Rows ``start`` to ``stop`` of the microbatch, from rank ``source`` to rank ``target``."""

    source: int
    target: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start


@lru_cache(maxsize=1024)
def transfers(
    source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...], rows: int
) -> tuple[Message, ...]:
    """Every message of one microbatch of ``rows`` rows, in the order in which each rank sends and receives its own.

    The ranks of a stage are in the order of its layouts. Empty shards send and receive nothing.

    >>> two, one = Layout(width=2, data=2, tensor=1), Layout(width=1, data=1, tensor=1)
    >>> [(m.source, m.target, m.start, m.stop) for m in transfers(two, (0, 1), one, (2,), 8)]
    [(0, 2, 0, 4), (1, 2, 4, 8)]
    """
    return tuple(
        Message(source=source_ranks[sender], target=target_ranks[place], start=low, stop=high)
        for sender, place, low, high in messages(source, target, rows)
    )


def messages(source: Layout, target: Layout, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Messages as (sender's place in its stage, receiver's place in its own, first row, one past the last)."""
    shards = [source.rows(rows, i) for i in range(source.data)]
    ends = [stop for _, stop in shards]
    # Every rank holds one shard, so of each shard it is enough to know who of its holders has sent fewest rows.
    holders = [[(0, place) for place in range(i * source.inner, (i + 1) * source.inner)] for i in range(source.data)]
    for shard in range(target.data):
        first, last = target.rows(rows, shard)
        for place in range(shard * target.inner, (shard + 1) * target.inner):
            for i in range(bisect_right(ends, first), source.data):
                start, stop = shards[i]
                low, high = max(first, start), min(last, stop)
                if start >= last:
                    break
                if low >= high:
                    continue
                sent, sender = holders[i][0]
                heapreplace(holders[i], (sent + high - low, sender))
                yield sender, place, low, high


@noun
class Hop:
    """Where one stage hands over to the next. ``source`` and ``target``: layouts of the components on either side.

    ``exit`` and ``entry`` are what happens inside the two stages: the output is made whole, and a partial gradient of
    the input is summed. Between them go the messages.
    """

    source: Layout
    source_ranks: tuple[int, ...]
    target: Layout
    target_ranks: tuple[int, ...]

    @property
    def gradient_scale(self) -> float:
        """Factor on gradients on their way back."""
        return self.source.data / self.target.data

    def exit(self, exit_partial: bool = False, tokens: int = 0) -> Boundary:
        """The boundary behind the source's last component; ``exit_partial`` as that component's split says."""
        return Boundary(source=self.source, target=whole(self.source), exit_partial=exit_partial, exit_tokens=tokens)

    def entry(self, entry_partial: bool = False, tokens: int = 0) -> Boundary:
        """The boundary in front of the target's first component."""
        return Boundary(source=whole(self.target), target=self.target, entry_partial=entry_partial, entry_tokens=tokens)

    def forward(self, rows: int) -> tuple[Message, ...]:
        """Messages with activations."""
        return transfers(self.source, self.source_ranks, self.target, self.target_ranks, rows)

    def backward(self, rows: int) -> tuple[Message, ...]:
        """Messages with gradients."""
        return transfers(self.target, self.target_ranks, self.source, self.source_ranks, rows)


def whole(layout: Layout) -> Layout:
    """A layout of the same batch shards with nothing split: what enters and leaves a stage."""
    return replace(layout, tensor=1, sequence=False)


def hops(plan: Plan) -> tuple[Hop, ...]:
    """The hand-overs of ``plan``: one fewer than it has stages."""
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
