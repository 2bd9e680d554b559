"""Parallelism strategies, one per file. To add one, write its file and list it here; the contract test checks it."""

from __future__ import annotations

from asa.interfaces.strategy import DataStrategy, Strategies, TensorStrategy
from asa.schedules import schedules
from asa.strategies.hsdp import HybridShard
from asa.strategies.none import Whole
from asa.strategies.replicate import Replicate
from asa.strategies.sequence import SequenceParallel
from asa.strategies.tensor import TensorParallel
from asa.strategies.zero1 import SharedOptimizer
from asa.strategies.zero2 import ShardedGradients
from asa.strategies.zero3 import FullyShard

DATA: tuple[type[DataStrategy], ...] = (Replicate, SharedOptimizer, ShardedGradients, FullyShard, HybridShard)
TENSOR: tuple[type[TensorStrategy], ...] = (Whole, TensorParallel, SequenceParallel)


def offered() -> Strategies:
    """All strategies and schedules, for the planner to choose from and the executor to apply."""
    return Strategies(
        data={cls.identifier: cls() for cls in DATA},
        tensor={cls.identifier: cls() for cls in TENSOR},
        schedules=schedules(),
        checkpoint=True,
        offload=True,
    )
