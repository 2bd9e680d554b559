"""Declarations of strategies for tests of the planner: what pages of ``asa.strategies`` declare, and no conduct."""

from __future__ import annotations

from typing import Any

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy, Strategies, TensorStrategy
from asa.ir.graph import Component
from asa.ir.layout import largest_shard
from asa.ir.traffic import Collective, Memory, Share


class Whole(TensorStrategy):
    """Nothing split."""

    identifier = "none"

    def refusal(self, component: Component, degree: int) -> str:
        return "" if degree == 1 else "whole"

    def share(self, component: Component, degree: int) -> Share:
        c = component
        return Share(
            parameter_bytes=c.parameter_bytes,
            largest_parameter_bytes=c.largest_parameter_bytes,
            num_parameter_tensors=c.num_parameter_tensors,
            buffer_bytes=c.buffer_bytes,
            flops_per_sample=c.flops_per_sample,
            saved_bytes_per_sample=c.saved_bytes_per_sample,
        )

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        return ()

    def apply(self, module: Any, axis: Any) -> Any:
        raise NotImplementedError


class Split(Whole):
    """Everything divisible split."""

    identifier = "tensor"

    def refusal(self, component: Component, degree: int) -> str:
        split = component.split
        return "" if split is not None and degree <= split.max_degree else f"{component.name} cannot be split"

    def share(self, component: Component, degree: int) -> Share:
        c, s = component, component.split
        if s is None or degree == 1:
            return super().share(component, degree)
        lost = 1 - largest_shard(s.max_degree, degree) / s.max_degree
        return Share(
            parameter_bytes=c.parameter_bytes - lost * s.parameter_bytes,
            largest_parameter_bytes=c.largest_parameter_bytes,
            num_parameter_tensors=c.num_parameter_tensors,
            buffer_bytes=c.buffer_bytes,
            flops_per_sample=c.flops_per_sample - lost * s.flops_per_sample,
            saved_bytes_per_sample=c.saved_bytes_per_sample - lost * s.saved_bytes_per_sample,
        )

    def traffic(self, component: Component, degree: int, samples: float) -> tuple[Collective, ...]:
        if degree == 1 or component.split is None:
            return ()
        return tuple(
            Collective(op=c.op, phase=c.phase, bytes=c.bytes_per_sample * samples, ranks=degree)
            for c in component.split.collectives
        )


class Replicate(DataStrategy):
    """Stock data parallelism."""

    identifier = "replicate"

    def refusal(self, component: Component, degree: int) -> str:
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        size = share.parameter_bytes
        return Memory(
            parameters=size,
            gradients=size if degree == 1 else 0.0,
            optimizer=OPTIMIZER_WORDS[optimizer] * size,
            buffers=share.buffer_bytes,
            buckets=0.0 if degree == 1 else size,
        )

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        if degree == 1:
            return ()
        return (
            Collective(op="all_reduce", phase="gradient", bytes=share.parameter_bytes, ranks=degree, stride=stride),
        )

    def apply(self, module: Any, axis: Any) -> Any:
        raise NotImplementedError


class Zero1(Replicate):
    """Optimizer state sharded: parameters gathered after the step."""

    identifier = "zero1"

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        size = share.parameter_bytes
        return Memory(
            parameters=size,
            gradients=size,
            optimizer=OPTIMIZER_WORDS[optimizer] * size / degree,
            buffers=share.buffer_bytes,
        )

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        if degree == 1:
            return ()
        size = share.parameter_bytes
        return (
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="update", bytes=size, ranks=degree, stride=stride),
        )


class Zero3(Replicate):
    """Everything sharded, gathered when needed."""

    identifier = "zero3"

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        size = share.parameter_bytes
        return Memory(
            parameters=size / degree,
            gradients=size / degree,
            optimizer=OPTIMIZER_WORDS[optimizer] * size / degree,
            buffers=share.buffer_bytes,
            transient=size if degree > 1 else 0.0,
        )

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        if degree == 1:
            return ()
        size = share.parameter_bytes
        return (
            Collective(op="all_gather", phase="forward", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="backward", bytes=size, ranks=degree, stride=stride),
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride),
        )


PLAIN = Strategies(data={"replicate": Replicate()}, tensor={"none": Whole(), "tensor": Split()})
FULL = Strategies(
    data={"replicate": Replicate(), "zero1": Zero1(), "zero3": Zero3()}, tensor={"none": Whole(), "tensor": Split()}
)
