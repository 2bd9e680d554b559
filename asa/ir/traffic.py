"""Traffic and memory in the form in which strategies declare them and the cost model prices them."""

from __future__ import annotations

from typing import Literal, get_args

from asa.ir.codec import noun

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)

Phase = Literal["forward", "backward", "gradient", "update"]
"""When a collective runs. In ``forward`` and ``backward`` it blocks. ``gradient`` overlaps with the rest of backward.
``update`` blocks around the optimizer step."""


@noun
class Collective:
    """One collective of one step, or of one microbatch for ``forward`` and ``backward``.

    ``bytes`` is the size of the *whole* tensor: the reduced buffer of an all_reduce, the gathered output of an
    all_gather, the input of a reduce_scatter, everything that one rank sends in an all_to_all, the message of any
    other. ``ranks`` is the size of the group. ``stride`` is the distance between its consecutive members, in ranks;
    with the cluster's levels it determines which links the group crosses.
    """

    op: CollectiveOp
    phase: Phase
    bytes: float
    ranks: int
    stride: int = 1


@noun
class Share:
    """One rank's computation and memory for a component after tensor parallelism, before data parallelism.

    ``saved_bytes_per_sample``: the rank's activations saved for backward; ``tied``: whether it shares a parameter with
    other components.
    """

    parameter_bytes: float
    largest_parameter_bytes: float
    num_parameter_tensors: int
    buffer_bytes: float
    flops_per_sample: float
    saved_bytes_per_sample: float
    tied: bool = False


@noun
class Adjacent:
    """Sizes in bytes of the components around a component in a rank's backward, for strategies whose buffers exist
    together with theirs.

    Attributes:
        front, behind: parameter bytes of the nearest component before, and after, that has any.
        rest: parameter bytes of the component and all after it. Inside a row of equal components it may be that of
            another one of them, which decides nothing (:mod:`asa.interfaces.units`).
        saved: activations that the component frees.
        copying: whether data received by a scatter takes extra memory before it is added (messages between CPU ranks).
    """

    front: float = 0.0
    behind: float = 0.0
    rest: float = 0.0
    saved: float = 0.0
    num_microbatches: int = 1
    copying: bool = False


@noun
class Memory:
    """Bytes that one rank holds for one component. Activations are counted separately, because they depend on the
    microbatch.

    Attributes:
        parameters, gradients, optimizer, buffers: last the whole step.
        buckets: copies of gradients for communication.
        transient: exists only while the component itself computes (gathered weights, workspace).
        accumulated: replaces ``gradients`` while several microbatches accumulate theirs, if it is more.
        kept: lasts from the first forward of a step to the last backward: like an activation with one microbatch, like
            state with several.
        updating: is allocated around the optimizer step, when ``transient`` has been freed.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0
    buckets: float = 0.0
    transient: float = 0.0
    accumulated: float | None = None
    kept: float = 0.0
    updating: float = 0.0

    @property
    def state(self) -> float:
        """Bytes that stay from step to step: everything but gradients and what exists only for a while."""
        return self.parameters + self.optimizer + self.buffers + self.buckets
