"""The interface of strategies. Each strategy is one file that declares its memory and traffic, and implements them.

The declaration (``share``, ``memory``, ``traffic``) does not depend on bandwidth; :mod:`asa.cost` prices it without
knowing the strategy. ``apply`` implements it with torch, imported inside. A contract test checks every strategy: at
degree 1 it moves nothing, state never grows with degree, and the collectives of ``apply`` are those of ``traffic``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from asa.interfaces.schedule import Schedule
from asa.ir.graph import Component
from asa.ir.plan import DataDegree, DataStrategyName, TensorStrategyName
from asa.ir.traffic import Adjacent, Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis

OPTIMIZER_WORDS: dict[str, int] = {"sgd": 1, "adamw": 2}
"""Words of optimizer state per parameter: momentum for SGD, first and second moment for AdamW."""

SENT_BYTES = 1 << 20
"""Updated parameters are sent together in copies of at most this size; a larger one is sent alone and in place."""


class TensorStrategy(ABC):
    """Splits one component's tensors over ``degree`` ranks that see the same samples."""

    identifier: ClassVar[TensorStrategyName]

    @abstractmethod
    def refusal(self, component: Component, degree: int) -> str:
        """Why this component cannot be split over ``degree`` ranks; empty if it can."""

    @abstractmethod
    def share(self, component: Component, degree: int) -> Share:
        """What the rank with the largest shard holds and computes."""

    @abstractmethod
    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """Collectives inside the component for one microbatch of ``samples`` per rank; stride 1."""

    @abstractmethod
    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Split ``module`` (one traced component with full weights) in place, and return the module to call."""


class DataStrategy(ABC):
    """Spreads samples over ``degree`` ranks, and decides which ranks hold parameters, gradients and optimizer state."""

    identifier: ClassVar[DataStrategyName]

    joint: ClassVar[bool] = False
    """Whether the memory of a component depends on which neighbouring components run the same way."""

    prefetches: ClassVar[bool] = False
    """Whether weights are gathered while the preceding component computes, on devices with a stream for it."""

    def of(self, choice: DataDegree) -> DataStrategy:
        """The strategy configured for ``choice``; itself unless ``choice`` specifies more than a degree."""
        return self

    @abstractmethod
    def refusal(self, component: Component, degree: int) -> str:
        """Why this component cannot be spread over ``degree`` ranks; empty if it can."""

    @abstractmethod
    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Bytes held by the rank that holds most."""

    def together(self, shares: Sequence[Share], degree: int, optimizer: str) -> float:
        """Bytes of optimizer state of the rank that holds most, for neighbouring components that run as one segment."""
        return sum(self.memory(s, degree, optimizer).optimizer for s in shares)

    def least(self, share: Share, degree: int, optimizer: str, others: float = float("inf")) -> float:
        """Lower bound on a component's part of :meth:`together`, in bytes, whatever neighbours run the same way: sums
        of these bounds never exceed it. ``others``: parameter bytes of all components that may be its neighbours; it
        may be finite for at most one component of a network, and is infinite for the rest."""
        return self.memory(share, degree, optimizer).optimizer

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes held from the component's backward until the whole backward ends, if the component before it does not
        run the same way. State and the persistent part of gradients are not counted."""
        return 0.0

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Peak bytes in the component's backward, without state, activations and the persistent part of gradients.
        Neighbours run the same way."""
        return self.memory(share, degree, "sgd").transient

    @abstractmethod
    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Collectives per step (``gradient``, ``update``) or per microbatch (``forward``, ``backward``)."""

    @abstractmethod
    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Wrap ``module`` (a segment: neighbouring components with the same layout) for training on ``axis``."""


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """The strategies and schedules offered to the planner and the executor, by identifier.

    ``checkpoint``: whether components may recompute their activations in backward; ``offload``: whether they may keep
    their optimizer state on the host.
    """

    data: dict[str, DataStrategy]
    tensor: dict[str, TensorStrategy]
    schedules: dict[str, Schedule] = field(default_factory=dict)
    checkpoint: bool = False
    offload: bool = False
