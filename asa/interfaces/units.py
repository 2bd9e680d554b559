"""What stock ``fully_shard`` (FSDP2) holds for a moment while backward is in one of its units (a component).

Of a unit of ``s`` bytes, between neighbours of ``f`` in front and ``b`` behind, each rank keeps a part ``p``. Backward
gathers the weights into a flat buffer and copies them out, gathers the unit in front ahead of time into such a buffer,
makes the gradients, lets the weights go, copies the gradients into a buffer to be scattered from, and lets that go only
when the next unit is through, or, of the last unit, when all of backward is. On a CPU a scatter by messages takes its
buffer once more, for what it receives (:mod:`asa.sharding.direct`). Forward is the same with gathers only, and
remembers the last buffer until the next gather is done.

torch.distributed.fsdp._fully_shard: ``FSDPParamGroup.pre_backward``, ``post_backward``; Zhao et al. 2023, "PyTorch
FSDP", 3.3 and 3.4.
"""

from __future__ import annotations

from asa.ir.traffic import Adjacent, Share


def released(share: Share, degree: int, beside: Adjacent) -> float:
    """Weights let go of between forward and backward. Bytes beside state, activations and parts of gradients, or, with
    several microbatches, whole gradients."""
    s, f, b = share.parameter_bytes, beside.front, beside.behind
    p, copy = s / degree, int(beside.copying)
    if beside.num_microbatches > 1:
        # The last time, of the gradients behind there is the buffer they are scattered from, and their part already.
        left = b / degree
        return max(
            2 * s + left,  # copied out
            s + f + left,  # the unit in front is gathered
            s + f + left + share.largest_parameter_bytes,  # a gradient before it is added to the others
            copy * s + p + f,  # scattered
            s + f - beside.saved,  # forward: gathered behind the buffer of the one in front
        )
    return max(
        2 * s + f + b - p,  # all gradients made
        (1 + copy) * s + f - beside.saved,  # scattered, the weights gone
    )


def gathered_once(share: Share, degree: int, beside: Adjacent) -> float:
    """Weights kept from forward to backward, and counted as such. Bytes beside those, as in :func:`released`."""
    s, f, b = share.parameter_bytes, beside.front, beside.behind
    p, copy = s / degree, int(beside.copying)
    if beside.num_microbatches > 1:
        return max(share.largest_parameter_bytes, p)
    return max(
        s + b - p,  # all gradients made
        copy * s - beside.saved,  # scattered, the weights gone
        f - beside.saved - beside.rest / degree,  # forward: gathered behind the buffer of the one in front
    )


def left(share: Share, degree: int, num_microbatches: int) -> float:
    """What stays of the first unit of those sharded as one, until backward is over: the buffer that its gradients
    were scattered from. Bytes beside state and parts of gradients, or, with several microbatches, whole gradients."""
    if degree == 1:
        return 0.0
    return share.parameter_bytes if num_microbatches == 1 else share.parameter_bytes / degree
