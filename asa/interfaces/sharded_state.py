"""Memory and traffic of strategies that shard a component's state over ranks, one unit for each component.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from typing import ClassVar

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.interfaces.units import gathered_once, released, remaining_bytes
from asa.ir.graph import Component
from asa.ir.traffic import Adjacent, Collective, Memory, Share


class ShardedState(DataStrategy):
    """Parameters, gradients and optimizer state are sharded over the data group. Gathered weights are released after a
    component's forward and after its backward, or with ``once`` after its last backward of a step.

    Weights of a component that shares a parameter with others always stay until its last backward, because the others
    use them in between.
    """

    joint = True
    prefetches = True
    once: ClassVar[bool] = False

    def refusal(self, component: Component, degree: int) -> str:
        """Empty: any component can be sharded; uneven dimensions are padded."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory with state sharded over ``degree`` ranks; weights and gradients are whole while the component
        computes, or weights from forward to backward. Gradients accumulated over several microbatches stay whole until
        the last one scatters them."""
        size = share.parameter_bytes
        part, whole = size / degree, 0.0 if degree == 1 else size
        stays = self.once or share.tied
        return Memory(
            parameters=part,
            gradients=part,
            optimizer=OPTIMIZER_WORDS[optimizer] * part,
            buffers=share.buffer_bytes,
            accumulated=None if degree == 1 else size,
            transient=whole if stays else 2 * whole,
            kept=whole if stays else 0.0,
        )

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes of the reduce-scatter buffer, which replaces accumulated gradients."""
        return remaining_bytes(share, degree, num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes of whole gradients, and of whole weights that do not stay, including buffers of the neighbours
        (:mod:`asa.interfaces.units`)."""
        if degree == 1:
            return 0.0
        if self.once:
            return gathered_once(share, degree, beside)
        return max(0.0, released(share, degree, beside) - share.tied * share.parameter_bytes)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Two gathers of the weights per microbatch, or one of the updated weights per step where they stay, and one
        reduce-scatter of the gradients per step."""
        size = share.parameter_bytes
        if degree == 1 or not size:
            return ()
        scattered = Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride)
        if self.once or share.tied:
            return scattered, Collective(op="all_gather", phase="update", bytes=size, ranks=degree, stride=stride)
        return (
            Collective(op="all_gather", phase="forward", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="backward", bytes=size, ranks=degree, stride=stride),
            scattered,
        )
