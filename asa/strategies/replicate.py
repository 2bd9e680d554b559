"""Data strategy ``replicate``: every rank holds all state; gradients are averaged in buckets during backward (DDP).

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class Replicate(DataStrategy):
    """Whole on every rank of the data group; a bucket of gradients is all-reduced as soon as it is full."""

    identifier = "replicate"

    def refusal(self, component: Component, degree: int) -> str:
        """Empty: any component can be replicated."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory with gradients stored in buckets that persist between steps. Each gradient is
        computed outside and copied in, so the largest one exists twice for a moment. Gradients accumulated over several
        microbatches all stay outside until the last microbatch."""
        size = share.parameter_bytes
        return Memory(
            parameters=size,
            gradients=size if degree == 1 else 0.0,
            optimizer=OPTIMIZER_WORDS[optimizer] * size,
            buffers=share.buffer_bytes,
            buckets=0.0 if degree == 1 else size,
            accumulated=None if degree == 1 else size,
            transient=0.0 if degree == 1 else share.largest_parameter_bytes,
        )

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """One all_reduce of the gradients per step, overlapped with backward."""
        if degree == 1 or not share.parameter_bytes:
            return ()
        size = share.parameter_bytes
        return (Collective(op="all_reduce", phase="gradient", bytes=size, ranks=degree, stride=stride),)

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Have the gradients of ``module`` averaged."""
        from asa.sharding.gradients.replicated import replicated

        return replicated(module, axis)
