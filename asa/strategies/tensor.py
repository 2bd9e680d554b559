"""Tensor strategy ``tensor``: weights of one component split over ranks that see the same samples.

Linear layers split by columns and rows, attention by heads, convolutions by output and input channels with their
BatchNorm (Shoeybi et al. 2019, derived per component by :mod:`asa.sharding.layers.propagate`). What can be split in a
component, and the collectives inside it, come from its graph (:class:`asa.ir.graph.TensorSplit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.split import split_refusal, split_share
from asa.interfaces.strategy import TensorStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class TensorParallel(TensorStrategy):
    """Column, row, head and channel splits, alternating."""

    identifier = "tensor"

    def refusal(self, component: Component, degree: int) -> str:
        """Why not: the component has nothing to split, or its narrowest split dimension has too few units."""
        return split_refusal(component, degree)

    def share(self, component: Component, degree: int) -> Share:
        """The largest shard. Uneven cuts round up, at the granularity of the narrowest split dimension."""
        return split_share(component, degree)

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """Collectives inside the component; those at its entry and exit belong to the boundaries."""
        if degree == 1 or component.split is None:
            return ()
        return tuple(
            Collective(op=c.op, phase=c.phase, bytes=c.bytes_per_sample * samples, ranks=degree)
            for c in component.split.collectives
        )

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Replace every split layer by this rank's shard."""
        from asa.sharding.layers.tensor import split
        from asa.tracing.component import TracedComponent

        assert isinstance(module, TracedComponent)
        return split(module, axis)
