"""Tensor strategy ``sequence``: tensor parallelism; activations between the split layers are cut by tokens.

Norms, residuals and dropout work on a rank's tokens. The all_reduce after a pair of split layers becomes a
reduce_scatter by tokens, and tokens are gathered before the next pair: the same bytes, with a part of the activations.
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", 4.2.2. Parameters are split as
under ``tensor``. Neighbours with the same layout pass tokens on as they are; other boundaries gather or cut them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asa.interfaces.split import split_refusal, split_share
from asa.interfaces.strategy import TensorStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class SequenceParallel(TensorStrategy):
    """Column, row and head splits, with activations cut by tokens between them."""

    identifier = "sequence"

    def refusal(self, component: Component, degree: int) -> str:
        """Why not: tensor parallelism cannot split the component, or it cannot work on cut tokens."""
        refusal = split_refusal(component, degree)
        if refusal or component.split is None:
            return refusal
        sequence = component.split.sequence
        if sequence is None:
            return f"{component.name} cannot be cut by tokens: not all of it works on some, or its profile is old"
        if degree > sequence.tokens:
            return f"{component.name} has {sequence.tokens} tokens, asked {degree} ways"
        return ""

    def share(self, component: Component, degree: int) -> Share:
        """The share under tensor parallelism, less the activations that the rank with the most tokens saves."""
        share, split = split_share(component, degree), component.split
        if degree == 1 or split is None or split.sequence is None:
            return share
        saved = max(0.0, share.saved_bytes_per_sample - split.sequence.spared(degree))
        return replace(share, saved_bytes_per_sample=saved)

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """Gathers and scatters of tokens, padded to the largest shard, and the all-reduce of the gradients of
        parameters that work on tokens."""
        split = component.split
        if degree == 1 or split is None or split.sequence is None:
            return ()
        sequence = split.sequence
        padded = degree * sequence.share(degree) * samples
        found = [
            Collective(op=c.op, phase=c.phase, bytes=c.bytes_per_sample * padded, ranks=degree)
            for c in sequence.collectives
        ]
        if sequence.summed_parameter_bytes:
            size = sequence.summed_parameter_bytes
            found.append(Collective(op="all_reduce", phase="backward", bytes=size, ranks=degree))
        return tuple(found)

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Replace every split layer by this rank's shard, and gather and scatter tokens around them."""
        from asa.sharding.layers.tensor import split
        from asa.tracing.component import TracedComponent

        assert isinstance(module, TracedComponent)
        return split(module, axis, tokens=True)
