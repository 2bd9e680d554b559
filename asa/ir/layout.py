"""The law of parallel layouts inside a stage: who holds what, and what a boundary between two layouts moves.

A stage of ``width`` ranks runs a component in a layout (d, t): its batch is cut into d shards, and the
``width / d`` ranks that share a shard split the component's tensors t ways; where t is smaller than that,
the remaining ranks repeat the same work on the same data. Ranks of one tensor group are neighbours.

Cuts are ``floor(i * total / parts)``: balanced to one element, defined for any total, and *nested*: whenever
d2 divides d1, every cut of d2 is a cut of d1, so that a boundary never moves more than it must.

Gradient convention: in a layout of data degree d the loss each rank differentiates is the mean over its own
shard, so gradients are d times that shard's contribution to the mean over the batch (what averaging data
parallelism expects), complete on each of the ranks that share the shard. A boundary from d1 to d2 therefore
scales gradients by d1 / d2 on the way back.
"""

from __future__ import annotations

from asa.ir.codec import noun
from asa.ir.traffic import Collective


def bounds(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of the ``index``-th of ``parts`` shards of ``total`` elements.

    >>> [bounds(100, 3, i) for i in range(3)]
    [(0, 33), (33, 66), (66, 100)]
    """
    return index * total // parts, (index + 1) * total // parts


def largest_shard(total: int, parts: int) -> int:
    """Elements in the largest of ``parts`` shards of ``total``."""
    return -(-total // parts)


@noun
class Layout:
    """One component's layout in a stage: see the module. ``data * tensor`` divides ``width``."""

    width: int
    data: int
    tensor: int

    def __post_init__(self) -> None:
        if min(self.width, self.data, self.tensor) < 1 or self.width % (self.data * self.tensor):
            raise ValueError(f"data {self.data} x tensor {self.tensor} does not divide a stage of {self.width} ranks")

    @property
    def inner(self) -> int:
        """Ranks that share one batch shard."""
        return self.width // self.data

    @property
    def copies(self) -> int:
        """Ranks that repeat the very same work."""
        return self.inner // self.tensor

    def data_index(self, rank: int) -> int:
        """Which batch shard ``rank`` holds."""
        return rank // self.inner

    def tensor_index(self, rank: int) -> int:
        """Which tensor shard ``rank`` holds."""
        return rank % self.inner % self.tensor

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Ranks, in order of batch shard, that hold the same parameters on different data."""
        return tuple(range(rank % self.inner, self.width, self.inner))

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Ranks, in order of tensor shard, that split the same component on the same data."""
        first = rank - self.tensor_index(rank)
        return tuple(range(first, first + self.tensor))

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """All data groups of the stage."""
        return tuple(self.data_group(r) for r in range(self.inner))

    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """All tensor groups of the stage."""
        return tuple(self.tensor_group(r) for r in range(0, self.width, self.tensor))


def gather_group(width: int, fine: int, coarse: int, rank: int) -> tuple[int, ...]:
    """The ``fine / coarse`` ranks whose distinct shards of degree ``fine`` make up ``rank``'s coarse shard.

    ``coarse`` divides ``fine`` divides ``width``.
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
    """What converts the activations of one layout into another's, forward and back.

    ``entry_partial``: the target component hands back its input gradient as a partial sum over its tensor
    group. ``exit_partial``: the source hands on its output as one. A *fused* boundary turns that reduction
    and the change of batch shard into one reduce_scatter.
    """

    source: Layout
    target: Layout
    exit_partial: bool = False
    entry_partial: bool = False

    @property
    def meeting(self) -> int:
        """The coarser data degree both layouts nest in: where neither divides the other, data meets there."""
        from math import gcd

        return gcd(self.source.data, self.target.data)

    @property
    def gathers(self) -> int:
        """Size of the forward gather group (1: none)."""
        return self.source.data // self.meeting

    @property
    def slices(self) -> int:
        """Into how many parts each rank's data is cut in forward (1: not at all)."""
        return self.target.data // self.meeting

    @property
    def fused_entry(self) -> bool:
        """Backward: reduce the partial gradient and re-shard the batch in one reduce_scatter."""
        t = self.target
        return self.entry_partial and self.slices == 1 and t.copies == 1 and self.gathers == t.tensor > 1

    @property
    def fused_exit(self) -> bool:
        """Forward: reduce the partial output and re-shard the batch in one reduce_scatter."""
        s = self.source
        return self.exit_partial and self.gathers == 1 and s.copies == 1 and self.slices == s.tensor > 1

    def traffic(self, size: float, *, gradient: bool = True) -> tuple[Collective, ...]:
        """Collectives of one crossing of ``size`` bytes (the tensor of the whole microbatch, all shards).

        ``gradient`` is false where nothing in front needs one (the model's input).
        """
        s, t = self.source, self.target
        at_source, at_meeting, at_target = (size / d for d in (s.data, self.meeting, t.data))
        gather_stride, slice_stride = s.width // s.data, t.width // t.data
        found: list[Collective] = []
        if self.exit_partial and s.tensor > 1:
            if self.fused_exit:
                found.append(Collective(op="reduce_scatter", phase="forward", bytes=at_source, ranks=s.tensor))
            else:
                found.append(Collective(op="all_reduce", phase="forward", bytes=at_source, ranks=s.tensor))
        if self.gathers > 1:
            found.append(
                Collective(op="all_gather", phase="forward", bytes=at_meeting, ranks=self.gathers, stride=gather_stride)
            )
        if not gradient:
            return tuple(found)
        if self.entry_partial and t.tensor > 1:
            if self.fused_entry:
                found.append(Collective(op="reduce_scatter", phase="backward", bytes=at_target, ranks=t.tensor))
            else:
                found.append(Collective(op="all_reduce", phase="backward", bytes=at_target, ranks=t.tensor))
        if self.slices > 1:
            found.append(
                Collective(op="all_gather", phase="backward", bytes=at_meeting, ranks=self.slices, stride=slice_stride)
            )
        return tuple(found)
