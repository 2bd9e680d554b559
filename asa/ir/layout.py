"""Parallel layouts inside a stage: which rank holds what, and what a boundary between two layouts moves.

A stage of ``width`` ranks runs a component in a layout (d, t). Its batch is cut into d shards. The ``width / d`` ranks
that share a shard split the component's tensors t ways. If t is smaller than ``width / d``, the remaining ranks repeat
the same work on the same data. The ranks of one tensor group are consecutive.

Cuts are at ``floor(i * total / parts)``. Shards then differ by at most one element, and any total can be cut. The cuts
are *nested*: if d2 divides d1, every cut of d2 is a cut of d1, so that a boundary never moves more than it must.

On unequal devices the ranks of a stage have *weights*, whole numbers, and a batch is cut in proportion to them. The
weight of a shard is the sum over its ranks, and a cut is at ``floor(total * weight before / total weight)``. Equal
weights give the cuts above. Cuts stay nested, because weights belong to ranks. Tensors are always cut evenly.

Gradients: in a layout of data degree d, each rank differentiates the mean loss over its own shard. Its gradients are
therefore d times that shard's contribution to the mean over the batch, which is what averaging data parallelism
expects. They are complete on each of the ranks that share the shard. A boundary from d1 to d2 therefore scales
gradients by d1 / d2 in backward.
"""

from __future__ import annotations

from math import gcd

from asa.ir.codec import hashed, noun
from asa.ir.traffic import Collective, CollectiveOp, Phase

MOST_WEIGHT = 2**24
"""Largest weight of a rank: larger than any global batch."""


def bounds(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of shard number ``index`` of ``parts`` shards of ``total`` elements.

    >>> [bounds(100, 3, i) for i in range(3)]
    [(0, 33), (33, 66), (66, 100)]
    """
    return index * total // parts, (index + 1) * total // parts


def largest_shard(total: int, parts: int) -> int:
    """Number of elements in the largest of ``parts`` shards of ``total`` elements."""
    return -(-total // parts)


@hashed
@noun
class Layout:
    """Layout of one component in a stage of ``width`` ranks; ``data * tensor`` divides ``width``.

    ``weights`` has one number per rank of the stage, and is empty if batches are cut evenly. With ``sequence``, the
    component's input (and its output, if it has tokens) is split by tokens, dimension 1, over its tensor group;
    otherwise every rank of the group has all tokens.
    """

    width: int
    data: int
    tensor: int
    weights: tuple[int, ...] = ()
    sequence: bool = False

    def __post_init__(self) -> None:
        if min(self.width, self.data, self.tensor) < 1 or self.width % (self.data * self.tensor):
            raise ValueError(f"data {self.data} x tensor {self.tensor} does not divide a stage of {self.width} ranks")
        if self.sequence and self.tensor == 1:
            raise ValueError("tokens are cut over a tensor group of 2 ranks or more")
        if self.weights:
            check_weights(self.weights, self.width)

    def rows(self, total: int, index: int) -> tuple[int, int]:
        """Half-open range of shard ``index`` in a batch of ``total`` rows.

        >>> layout = Layout(width=3, data=3, tensor=1, weights=(2, 1, 1))
        >>> [layout.rows(9, i) for i in range(3)]
        [(0, 4), (4, 6), (6, 9)]
        """
        if not self.weights:
            return bounds(total, self.data, index)
        all_of_it, inner = sum(self.weights), self.inner
        front = sum(self.weights[: index * inner])
        behind = front + sum(self.weights[index * inner : (index + 1) * inner])
        return front * total // all_of_it, behind * total // all_of_it

    def rows_of(self, total: int, rank: int) -> tuple[int, int]:
        """Half-open range of the shard that ``rank`` holds."""
        return self.rows(total, self.data_index(rank))

    def sizes(self, total: int) -> tuple[int, ...]:
        """Number of elements in each shard."""
        return tuple(stop - start for start, stop in (self.rows(total, i) for i in range(self.data)))

    def fewest(self, total: int) -> int:
        """Number of elements in the smallest shard."""
        return min(self.sizes(total)) if self.weights else total // self.data

    @property
    def least(self) -> int:
        """The smallest batch size from which on no shard is empty."""
        if not self.weights:
            return self.data
        blocks = [sum(self.weights[i : i + self.inner]) for i in range(0, self.width, self.inner)]
        return -(-sum(self.weights) // min(blocks))

    def share(self, index: int) -> float:
        """Fraction of a batch, 0 to 1, in shard ``index``, without rounding."""
        if not self.weights:
            return 1 / self.data
        return sum(self.weights[index * self.inner : (index + 1) * self.inner]) / sum(self.weights)

    @property
    def largest_share(self) -> float:
        """Fraction of a batch in the largest shard, without rounding."""
        return max(self.share(i) for i in range(self.data)) if self.weights else 1 / self.data

    @property
    def inner(self) -> int:
        """Number of ranks that share one batch shard."""
        return self.width // self.data

    @property
    def copies(self) -> int:
        """Number of ranks that repeat the same work."""
        return self.inner // self.tensor

    def data_index(self, rank: int) -> int:
        """Index of the batch shard that ``rank`` holds."""
        return rank // self.inner

    def tensor_index(self, rank: int) -> int:
        """Index of the tensor shard that ``rank`` holds."""
        return rank % self.inner % self.tensor

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Ranks, in order of batch shard, that hold the same parameters on different data."""
        return tuple(range(rank % self.inner, self.width, self.inner))

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Ranks, in order of tensor shard, that split the same component on the same data."""
        first = rank - self.tensor_index(rank)
        return tuple(range(first, first + self.tensor))

    def inside_group(self, rank: int, shards: int) -> tuple[int, ...]:
        """The ``shards`` consecutive ranks of the data group of ``rank``, including itself, over which one copy of the
        state is sharded."""
        first = self.data_index(rank) // shards * shards
        return self.data_group(rank)[first : first + shards]

    def across_group(self, rank: int, shards: int) -> tuple[int, ...]:
        """Ranks of the data group of ``rank`` that hold the same shard of the other copies, including ``rank``."""
        return self.data_group(rank)[self.data_index(rank) % shards :: shards]

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """All data groups of the stage."""
        return tuple(self.data_group(r) for r in range(self.inner))

    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """All tensor groups of the stage."""
        return tuple(self.tensor_group(r) for r in range(0, self.width, self.tensor))


def check_weights(weights: tuple[int, ...], ranks: int) -> None:
    """Check that a batch can be cut by these weights of ranks.

    Raises:
        ValueError: not one per rank, or one out of range.
    """
    if len(weights) != ranks:
        raise ValueError(f"{len(weights)} weights for a stage of {ranks} ranks: one for each, or none")
    if min(weights) < 1 or max(weights) > MOST_WEIGHT:
        raise ValueError(f"weights of ranks are whole numbers from 1 to {MOST_WEIGHT}, these are {list(weights)}")


def lowest_terms(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest whole-number weights in the same proportions; empty if all are equal. Where one would exceed
    ``MOST_WEIGHT``, they are rounded.

    >>> lowest_terms((6, 2)), lowest_terms((3, 3))
    ((3, 1), ())
    """
    if len(set(weights)) <= 1:
        return ()
    common, most = gcd(*weights), max(weights)
    if most > common * MOST_WEIGHT:
        return lowest_terms(tuple(max(1, round(w * MOST_WEIGHT / most)) for w in weights))
    return tuple(w // common for w in weights)


def gather_group(width: int, fine: int, coarse: int, rank: int) -> tuple[int, ...]:
    """The ``fine / coarse`` ranks whose distinct shards of degree ``fine`` make up ``rank``'s coarse shard.

    ``coarse`` must divide ``fine``, and ``fine`` must divide ``width``.
    """
    step = width // fine
    block = width // coarse
    first = rank // block * block + rank % step
    return tuple(range(first, first + block, step))


def gather_groups(width: int, fine: int, coarse: int) -> tuple[tuple[int, ...], ...]:
    """All gather groups of a stage, each once."""
    return tuple(dict.fromkeys(gather_group(width, fine, coarse, r) for r in range(width)))


@noun
class Boundary:
    """Conversion of activations from one layout to another, forward and backward.

    Attributes:
        entry_partial: whether the target component returns the gradient of its input as a partial sum over its tensor
            group.
        exit_partial: whether the source returns its output as a partial sum.
        exit_tokens, entry_tokens: number of tokens in the source's output and in the target's input if they can be
            split; 0 otherwise.

    A *fused* boundary sums the partial values and changes the batch shards in one reduce-scatter.

    Between equal layouts, tokens stay as they are. Otherwise they are gathered after the source and cut before the
    target in forward, and the reverse in backward. A value that is split by tokens is never partial.
    """

    source: Layout
    target: Layout
    exit_partial: bool = False
    entry_partial: bool = False
    exit_tokens: int = 0
    entry_tokens: int = 0

    def __post_init__(self) -> None:
        if self.source.weights != self.target.weights:
            raise ValueError("the layouts of one stage cut batches by the same weights")

    @property
    def meeting(self) -> int:
        """The data degree to which data is gathered before it is cut again: the greatest common divisor of both data
        degrees, in whose shards both layouts nest."""
        return gcd(self.source.data, self.target.data)

    @property
    def gathers(self) -> int:
        """Number of ranks in the gather group of forward (1: none)."""
        return self.source.data // self.meeting

    @property
    def slices(self) -> int:
        """Number of parts into which each rank's data is cut in forward (1: not cut)."""
        return self.target.data // self.meeting

    @property
    def silent(self) -> bool:
        """Whether nothing is moved, cut or scaled, forward or backward."""
        s, t = self.source, self.target
        tokens = self.gathers_tokens or self.cuts_tokens
        return s.data == t.data and not (tokens or self.reduces_exit or self.reduces_entry)

    @property
    def gathers_tokens(self) -> bool:
        """Whether the source's tokens are gathered in forward."""
        return self.source.sequence and self.exit_tokens > 0 and not self._keeps_tokens

    @property
    def cuts_tokens(self) -> bool:
        """Whether tokens are cut for the target in forward."""
        return self.target.sequence and self.entry_tokens > 0 and not self._keeps_tokens

    @property
    def _keeps_tokens(self) -> bool:
        return self.source == self.target and self.exit_tokens == self.entry_tokens

    @property
    def reduces_exit(self) -> bool:
        """Whether a partial output is summed in forward."""
        return self.exit_partial and self.source.tensor > 1 and not self.source.sequence

    @property
    def reduces_entry(self) -> bool:
        """Whether a partial gradient is summed in backward."""
        return self.entry_partial and self.target.tensor > 1 and not self.target.sequence

    @property
    def fused_entry(self) -> bool:
        """Whether backward reduces the partial gradient and re-shards the batch in one reduce-scatter."""
        t = self.target
        return self.reduces_entry and self.slices == 1 and t.copies == 1 and self.gathers == t.tensor

    @property
    def fused_exit(self) -> bool:
        """Whether forward reduces the partial output and re-shards the batch in one reduce-scatter."""
        s = self.source
        return self.reduces_exit and self.gathers == 1 and s.copies == 1 and self.slices == s.tensor

    def traffic(self, size: float, *, gradient: bool = True) -> tuple[Collective, ...]:
        """Collectives of one crossing of ``size`` bytes, the tensor of the whole microbatch over all shards.

        ``gradient`` is False if nothing before the boundary needs a gradient (the model's input). Uneven shards are
        padded to the largest one, and counted so.
        """
        s, t = self.source, self.target
        at_source, at_meeting, at_target = (size / d for d in (s.data, self.meeting, t.data))
        ahead = back = at_meeting
        if s.weights:
            at_source, at_target = size * s.largest_share, size * t.largest_share
            ahead, back = self.gathers * at_source, self.slices * at_target
            at_source = max(at_source, back) if self.fused_exit else at_source
            at_target = max(at_target, ahead) if self.fused_entry else at_target
        gather_stride, slice_stride = s.width // s.data, t.width // t.data
        collectives: list[Collective] = []
        if self.gathers_tokens:
            collectives.append(_gathered(s, "forward", size * s.largest_share, self.exit_tokens))
        if self.reduces_exit:
            op: CollectiveOp = "reduce_scatter" if self.fused_exit else "all_reduce"
            collectives.append(Collective(op=op, phase="forward", bytes=at_source, ranks=s.tensor))
        if self.gathers > 1:
            collectives.append(
                Collective(op="all_gather", phase="forward", bytes=ahead, ranks=self.gathers, stride=gather_stride)
            )
        if not gradient:
            return tuple(collectives)
        if self.cuts_tokens:
            collectives.append(_gathered(t, "backward", size * t.largest_share, self.entry_tokens))
        if self.reduces_entry:
            op = "reduce_scatter" if self.fused_entry else "all_reduce"
            collectives.append(Collective(op=op, phase="backward", bytes=at_target, ranks=t.tensor))
        if self.slices > 1:
            collectives.append(
                Collective(op="all_gather", phase="backward", bytes=back, ranks=self.slices, stride=slice_stride)
            )
        return tuple(collectives)


def _gathered(layout: Layout, phase: Phase, size: float, tokens: int) -> Collective:
    """The all-gather of all tokens of a rank's rows, ``size`` bytes; shards are padded to the largest one."""
    padded = layout.tensor * largest_shard(tokens, layout.tensor) / tokens
    return Collective(op="all_gather", phase=phase, bytes=size * padded, ranks=layout.tensor)
