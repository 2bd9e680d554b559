"""Tensor strategy ``none``: every rank holds the whole component."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import TensorStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class Whole(TensorStrategy):
    """No tensor parallelism: nothing is split or communicated."""

    identifier = "none"

    def refusal(self, component: Component, degree: int) -> str:
        """Why not; only degree 1 is allowed."""
        return "" if degree == 1 else f"{component.name} is whole: tensor degree {degree} needs strategy 'tensor'"

    def share(self, component: Component, degree: int) -> Share:
        """The whole component."""
        return Share(
            parameter_bytes=component.parameter_bytes,
            largest_parameter_bytes=component.largest_parameter_bytes,
            num_parameter_tensors=component.num_parameter_tensors,
            buffer_bytes=component.buffer_bytes,
            flops_per_sample=component.flops_per_sample,
            saved_bytes_per_sample=component.saved_bytes_per_sample,
            tied=bool(component.tied),
        )

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """No collectives."""
        return ()

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Return the module unchanged."""
        return module
