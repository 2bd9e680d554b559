"""A strategy is one page: it declares what it holds and moves, and does it.

The declaration (``share``, ``memory``, ``traffic``) knows no bandwidth; :mod:`asa.cost` prices it and knows no
strategy. ``apply`` does what was declared, with torch, imported inside. A contract test holds every page to its
word: degree 1 is silent, state never rises with degree, and the collectives of ``apply`` are those of ``traffic``.
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

    from asa.sharding.axis import Axis

OPTIMIZER_WORDS: dict[str, int] = {"sgd": 1, "adamw": 2}
"""State words per parameter: momentum; first and second moment."""

SENT_BYTES = 1 << 20
"""Updated parameters travel together, in copies of at most this size; a larger one by itself, where it is."""


class TensorStrategy(ABC):
    """Splits one component's tensors over ``degree`` ranks that see the same samples."""

    identifier: ClassVar[TensorStrategyName]

    @abstractmethod
    def refusal(self, component: Component, degree: int) -> str:
        """Why this component cannot be split that far; empty when it can."""

    @abstractmethod
    def share(self, component: Component, degree: int) -> Share:
        """What the rank with the most holds."""

    @abstractmethod
    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        """Collectives inside the component for one microbatch of ``samples`` per rank; stride 1."""

    @abstractmethod
    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Split ``module`` (one traced component holding full weights) in place; returns what to call."""


class DataStrategy(ABC):
    """Spreads samples over ``degree`` ranks, and decides who keeps parameters, gradients and optimizer state."""

    identifier: ClassVar[DataStrategyName]

    joint: ClassVar[bool] = False
    """Whether what a component holds depends on what neighbours are run alike."""

    prefetches: ClassVar[bool] = False
    """Whether its weights are gathered while the neighbour before it computes, where a device has a stream for that."""

    def of(self, choice: DataDegree) -> DataStrategy:
        """The page of ``choice``: another one only where that says more than a degree."""
        return self

    @abstractmethod
    def refusal(self, component: Component, degree: int) -> str:
        """Why this component cannot be spread that far; empty when it can."""

    @abstractmethod
    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Bytes held by the rank with the most."""

    def together(self, shares: Sequence[Share], degree: int, optimizer: str) -> float:
        """Bytes of optimizer state of the rank with the most, of neighbours that are run alike, as one."""
        return sum(self.memory(s, degree, optimizer).optimizer for s in shares)

    def least(self, share: Share, degree: int, optimizer: str, others: float = float("inf")) -> float:
        """Bytes of optimizer state that a component adds at least to what :meth:`together` says of any neighbours it is
        run alike with: no sum of these is above that. ``others``: parameter bytes of all components that may be its
        neighbours; for one component of a network at most, infinite for the rest."""
        return self.memory(share, degree, optimizer).optimizer

    def left(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes that are there from the component's backward until all of backward is over, where no neighbour in front
        is run alike; beside state and what stays of gradients."""
        return 0.0

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes beside state, activations and the part of the gradients that stays, at the worst moment of the
        component's backward; neighbours run the same way."""
        return self.memory(share, degree, "sgd").transient

    @abstractmethod
    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Collectives per step (``gradient``, ``update``) or per microbatch (``forward``, ``backward``)."""

    @abstractmethod
    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Wrap ``module`` (neighbouring components of one layout, as one) for training on ``axis``."""


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """The strategies and schedules offered to the planner and the executor, by identifier.

    ``checkpoint``: whether components may forget their activations and compute them again in backward; ``offload``:
    whether they may keep their optimizer state on the host.
    """

    data: dict[str, DataStrategy]
    tensor: dict[str, TensorStrategy]
    schedules: dict[str, Schedule] = field(default_factory=dict)
    checkpoint: bool = False
    offload: bool = False
