"""Memory and traffic of strategies that shard a component's state over ranks, one unit for each component.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.interfaces.units import released, remaining_bytes
from asa.ir.graph import Component
from asa.ir.traffic import Adjacent, Collective, Memory, Share


class ShardedState(DataStrategy):
    """Parameters, gradients and optimizer state are sharded over the data group; gathered weights are released after a
    component's forward and after its backward."""

    joint = True
    prefetches = True

    def refusal(self, component: Component, degree: int) -> str:
        """Empty: any component can be sharded; uneven dimensions are padded."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory with state sharded over ``degree`` ranks; weights and gradients are whole while the component
        computes. Gradients accumulated over several microbatches stay whole until the last one scatters them."""
        size = share.parameter_bytes
        part = size / degree
        return Memory(
            parameters=part,
            gradients=part,
            optimizer=OPTIMIZER_WORDS[optimizer] * part,
            buffers=share.buffer_bytes,
            accumulated=None if degree == 1 else size,
            transient=0.0 if degree == 1 else 2 * size,
        )

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes of the reduce-scatter buffer, which replaces accumulated gradients."""
        return remaining_bytes(share, degree, num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes of whole weights and gradients, including buffers of the neighbours (:mod:`asa.interfaces.units`)."""
        return 0.0 if degree == 1 else released(share, degree, beside)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Two gathers of the weights per microbatch and one reduce-scatter of the gradients per step."""
        size = share.parameter_bytes
        if degree == 1 or not size:
            return ()
        return (
            Collective(op="all_gather", phase="forward", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="backward", bytes=size, ranks=degree, stride=stride),
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride),
        )
