"""Tensor strategy ``tensor``: weights of one component split over ranks that see the same samples.

Linear layers by columns and rows, attention by heads, convolutions by output and input channels with their
BatchNorm (Shoeybi et al. 2019, derived per component by :mod:`asa.sharding.propagate`). What a component may
split, and the collectives inside it, come from its graph (:class:`asa.ir.graph.TensorSplit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import TensorStrategy
from asa.ir.graph import Component
from asa.ir.layout import largest_shard
from asa.ir.traffic import Collective, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.axis import Axis


class TensorParallel(TensorStrategy):
    """Column, row, head and channel splits, alternating."""

    identifier = "tensor"

    def refusal(self, component: Component, degree: int) -> str:
        """Refuses what has nothing to split, and more ranks than its narrowest cut has units."""
        split = component.split
        if split is None:
            return f"{component.name} cannot be split: {component.why_whole or 'no layer with a cut'}"
        if degree > split.max_degree:
            return f"{component.name} splits at most {split.max_degree} ways, asked {degree}"
        return ""

    def share(self, component: Component, degree: int) -> Share:
        """The largest shard: uneven cuts round up, at the narrowest cut's granularity."""
        split = component.split
        if split is None or degree == 1:
            fraction, parameters, flops, saved = 1.0, 0.0, 0.0, 0.0
        else:
            fraction = largest_shard(split.max_degree, degree) / split.max_degree
            parameters, flops, saved = split.parameter_bytes, split.flops_per_sample, split.saved_bytes_per_sample
        lost = 1 - fraction
        return Share(
            parameter_bytes=component.parameter_bytes - lost * parameters,
            largest_parameter_bytes=component.largest_parameter_bytes * (fraction if parameters else 1),
            num_parameter_tensors=component.num_parameter_tensors,
            buffer_bytes=component.buffer_bytes,
            flops_per_sample=component.flops_per_sample - lost * flops,
            saved_bytes_per_sample=component.saved_bytes_per_sample - lost * saved,
        )

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """The collectives inside; those at entry and exit belong to the boundaries."""
        if degree == 1 or component.split is None:
            return ()
        return tuple(
            Collective(op=c.op, phase=c.phase, bytes=c.bytes_per_sample * samples, ranks=degree)
            for c in component.split.collectives
        )

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Replace every split layer by this rank's shard of it."""
        from asa.sharding.tensor import split
        from asa.tracing.component import TracedComponent

        assert isinstance(module, TracedComponent)
        return split(module, axis)
