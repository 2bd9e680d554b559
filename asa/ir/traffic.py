"""What moves and what is held: the words in which strategies declare and the cost model prices."""

from __future__ import annotations

from typing import Literal, get_args

from asa.ir.codec import noun

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)

Phase = Literal["forward", "backward", "gradient", "update"]
"""When a collective runs: blocking in forward or backward; ``gradient``: overlapped with what is left of
backward; ``update``: blocking, around the optimizer step."""


@noun
class Collective:
    """One collective of one step (or of one microbatch, for ``forward`` and ``backward``).

    ``bytes`` is the *whole* tensor: the reduced buffer of an all_reduce, the gathered output of an all_gather,
    the input of a reduce_scatter, what one rank sends in all in an all_to_all, the message of the others.
    ``ranks`` is the size of the group; ``stride`` the distance between neighbours in it, in ranks, which with
    the cluster's levels decides what links it crosses.
    """

    op: CollectiveOp
    phase: Phase
    bytes: float
    ranks: int
    stride: int = 1


@noun
class Share:
    """What one rank computes and holds of a component after tensor parallelism, before data parallelism.

    ``saved_bytes_per_sample`` is the share of activations kept for backward.
    """

    parameter_bytes: float
    largest_parameter_bytes: float
    num_parameter_tensors: int
    buffer_bytes: float
    flops_per_sample: float
    saved_bytes_per_sample: float


@noun
class Adjacent:
    """What is around a component in a rank's backward, for strategies whose buffers meet those of the neighbours.

    ``front`` and ``behind`` are the parameter bytes of the nearest component on either side that has any, ``rest``
    those of the component and all behind it; ``saved`` are the activations it lets go of. ``copying``: what a
    scatter receives takes memory of its own, before it is added up (messages between CPU ranks).
    """

    front: float = 0.0
    behind: float = 0.0
    rest: float = 0.0
    saved: float = 0.0
    num_microbatches: int = 1
    copying: bool = False


@noun
class Memory:
    """Bytes one rank holds for one component.

    ``parameters``, ``gradients``, ``optimizer`` and ``buffers`` last the whole step; ``buckets`` are the
    communication copies of gradients; ``transient`` lives only while the component itself computes
    (gathered weights, workspace). ``accumulated`` is what takes the place of ``gradients`` while several microbatches
    add theirs up, where that is more. ``kept`` is there from the first forward of a step to the last backward: like an
    activation with one microbatch, like state with several. ``updating`` is allocated around the optimizer step, when
    ``transient`` is gone. Activations are counted apart: they depend on the microbatch.
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
        """What stays from step to step."""
        return self.parameters + self.optimizer + self.buffers + self.buckets
