"""Transient memory of stock ``fully_shard`` (FSDP2) during the backward of one of its units (a component).

A unit has ``s`` bytes, the unit before it ``f`` and the unit after it ``b``; each rank keeps a shard ``p`` of the unit.
Backward gathers the weights into a flat buffer and copies them out. It prefetches the unit before into another such
buffer, computes the gradients, frees the weights, and copies the gradients into a reduce-scatter buffer. That buffer
is freed when the next unit is done or, for the last unit, when the whole backward is done. On a CPU a reduce-scatter
by messages allocates its buffer once more, for what it receives (:mod:`asa.sharding.collectives.direct`). Forward is
the same with gathers only; it keeps the last buffer until the next gather is done.

torch.distributed.fsdp._fully_shard: ``FSDPParamGroup.pre_backward``, ``post_backward``; Zhao et al. 2023, "PyTorch
FSDP", 3.3 and 3.4.
"""

from __future__ import annotations

from asa.ir.traffic import Adjacent, Share


def released(share: Share, degree: int, beside: Adjacent) -> float:
    """Bytes if weights are freed between forward and backward. State, activations and gradient shards (with several
    microbatches: whole gradients) are not counted."""
    s, f, b = share.parameter_bytes, beside.front, beside.behind
    p, copy = s / degree, int(beside.copying)
    if beside.num_microbatches > 1:
        # Last microbatch: the unit after holds both its reduce-scatter buffer and its gradient shard.
        left = b / degree
        return max(
            2 * s + left,  # copied out
            s + f + left,  # the unit before is gathered
            s + f + left + share.largest_parameter_bytes,  # a new gradient before it is accumulated
            copy * s + p + f,  # scattered
            s + f - beside.saved,  # forward: gathered while the buffer of the unit before still exists
        )
    return max(
        2 * s + f + b - p,  # all gradients computed
        (1 + copy) * s + f - beside.saved,  # scattered, weights freed
    )


def gathered_once(share: Share, degree: int, beside: Adjacent) -> float:
    """Bytes if weights stay gathered from forward to backward. Not counted: those weights, and as :func:`released`."""
    s, f, b = share.parameter_bytes, beside.front, beside.behind
    p, copy = s / degree, int(beside.copying)
    if beside.num_microbatches > 1:
        return max(share.largest_parameter_bytes, p)
    return max(
        s + b - p,  # all gradients computed
        copy * s - beside.saved,  # scattered, weights freed
        f - beside.saved - beside.rest / degree,  # forward: gathered while the buffer of the unit before still exists
    )


def remaining_bytes(share: Share, degree: int, num_microbatches: int) -> float:
    """Bytes of the reduce-scatter buffer of a segment's first unit, which is held until backward ends. State and
    gradient shards (with several microbatches: whole gradients) are not counted."""
    if degree == 1:
        return 0.0
    return share.parameter_bytes if num_microbatches == 1 else share.parameter_bytes / degree
