"""Tensor strategy ``none``: the component whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import TensorStrategy
from asa.ir.graph import Component
from asa.ir.traffic import Collective, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.axis import Axis


class Whole(TensorStrategy):
    """Nothing is split, nothing moves."""

    identifier = "none"

    def refusal(self, component: Component, degree: int) -> str:
        """Only degree 1 makes sense."""
        return "" if degree == 1 else f"{component.name} is whole: tensor degree {degree} needs strategy 'tensor'"

    def share(self, component: Component, degree: int) -> Share:
        """All of it."""
        return Share(
            parameter_bytes=component.parameter_bytes,
            largest_parameter_bytes=component.largest_parameter_bytes,
            num_parameter_tensors=component.num_parameter_tensors,
            buffer_bytes=component.buffer_bytes,
            flops_per_sample=component.flops_per_sample,
            saved_bytes_per_sample=component.saved_bytes_per_sample,
        )

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """None."""
        return ()

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """The module itself."""
        return module
