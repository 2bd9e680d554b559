"""The numeric problem inside a stage: numbers only, no bandwidth, no strategy, no torch.

A component takes exactly one *configuration*. Neighbours see only each other's *layout* (data and tensor degree);
which data strategy keeps the state, and later checkpointing and offload, are private to a component. So an edge costs
one number per pair of layouts: 10 x 10 at width 8, and not 26 x 26. Milliseconds and GiB, so that the tolerances of
solvers mean something.

    minimise   sum work + sum edge - saving * tau
    tau    <=  sp * sum_{l<k} window_l  +  sc * sum_{l: released after k} sync_l           for every k
    memory     sum state + sum_{l<=k} activations_l + sum_{l>=k} gradients_l + transient_k <= capacity   for every k

``work`` contains all of a component's own time, its gradient synchronisation too; tau is the time during which
backward and gradient synchronisation run side by side (:mod:`asa.cost.step` derives it).
"""

from __future__ import annotations

from dataclasses import dataclass

from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree

MS = 1e3
"""Milliseconds per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One way to run one component. Times in ms per step, memory in GiB.

    ``work`` includes ``prompt + late``, the gradient synchronisation released with the component and later;
    ``window`` is the backward compute behind which others' synchronisation can hide.
    """

    layout: int
    data: DataDegree
    tensor: TensorDegree
    work: float
    window: float
    prompt: float
    late: float
    state: float
    activations: float
    gradients: float
    transient: float
    checkpoint: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """What passing from one layout to another costs (ms) and holds (GiB)."""

    cost: float
    activations: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One stage of ``width`` ranks. ``edges[i][a, b]`` joins layout a of component i to layout b of component i+1.

    ``release[i]`` is the component after whose backward the late part of component i's synchronisation leaves: its
    own, the one in front, or that of the one in front (one bucket is open at a time). ``saving`` is what a ms of
    overlap saves, ``sp`` and ``sc`` how much the two streams slow each other down. ``capacity`` is in GiB.
    """

    width: int
    num_microbatches: int
    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    configs: tuple[tuple[Config, ...], ...]
    edges: tuple[dict[tuple[int, int], Edge], ...]
    release: tuple[int, ...]
    saving: float
    sp: float
    sc: float
    capacity: float

    def __post_init__(self) -> None:
        n = len(self.names)
        if not n or not len(self.configs) == len(self.release) == len(self.edges) + 1 == n:
            raise ValueError("configs and releases come one per component, edges one less")
        if any(r not in (i, i - 1, self.release[max(0, i - 1)]) or r < 0 for i, r in enumerate(self.release)):
            raise ValueError("buckets are filled one after the other: releases (i), (i - 1), or that of i - 1")
        if self.saving < 0:
            raise ValueError("a negative saving is charged in the work of the configurations")

    def __len__(self) -> int:
        return len(self.names)

    def without_memory_limit(self) -> Problem:
        """The same problem with all the memory one could want."""
        from dataclasses import replace

        return replace(self, capacity=float("inf"))


Choice = tuple[int, ...]
"""One index into ``configs`` per component."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What a solver found. ``choice`` is None where nothing fits; ``bound`` is in ms, proved by that solver."""

    choice: Choice | None
    value: float
    bound: float
    solver: str

    @property
    def proved(self) -> bool:
        """Whether the solver has closed the gap (to one part in a million)."""
        return self.choice is None or self.value - self.bound <= 1e-6 * max(1.0, abs(self.value))
