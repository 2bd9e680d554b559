"""Tensor strategy ``sequence``: tensor parallel, and what is left whole between the split layers is cut by tokens.

Norms, residuals and dropout work on a rank's tokens; the all_reduce that ends a pair of split layers becomes a
reduce_scatter by tokens, and in front of the next one they are gathered: the same bytes, and a part of the activations.
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", 4.2.2. Parameters lie as under
``tensor``. Neighbours that run it alike hand tokens over as they are; elsewhere the boundary gathers or cuts them.
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

    from asa.sharding.axis import Axis


class SequenceParallel(TensorStrategy):
    """Column, row and head splits, and tokens between them."""

    identifier = "sequence"

    def refusal(self, component: Component, degree: int) -> str:
        """Refuses what tensor parallelism does, and what does not take its tokens cut."""
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
        """That of tensor parallelism, less the activations that the most tokens of a rank leave out."""
        share, split = split_share(component, degree), component.split
        if degree == 1 or split is None or split.sequence is None:
            return share
        saved = max(0.0, share.saved_bytes_per_sample - split.sequence.spared(degree))
        return replace(share, saved_bytes_per_sample=saved)

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """Gathers and scatters of tokens, padded to the most that a rank has, and the sum of the gradients of what
        works on tokens."""
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
        """Replace every split layer by this rank's shard of it, and join the tokens around them."""
        from asa.sharding.tensor import split
        from asa.tracing.component import TracedComponent

        assert isinstance(module, TracedComponent)
        return split(module, axis, tokens=True)
