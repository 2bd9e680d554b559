"""When the gradients of a component are sent, and how much of them: buckets of data parallelism, and compression.

DDP reduces *buckets*: gradients fill one in the order in which backward computes them; at 25 MiB (the first one: 1
MiB) it is sent. Part of a component's gradients is sent with a bucket that fills up inside it; the rest waits for the
component further to the front that fills the next bucket. Here the whole model is one DDP wrapper without tensor
parallelism, which is exact for plain data parallelism. A wrapper of fewer components sends earlier than predicted; one
of tensor-split components, whose buckets hold more components, sends later.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 3.2.
"""

from __future__ import annotations

from math import sqrt

from asa.cost.constants import constant
from asa.cost.traffic.collectives import Links
from asa.ir.codec import noun
from asa.ir.graph import LayerGraph
from asa.ir.plan import POWERSGD_RANK, CompressionName
from asa.ir.traffic import Collective

_WORD = 4
"""Bytes of an element of a gradient: parameters are fp32, whatever the precision of forward and backward."""


@noun
class Release:
    """When a component's gradients are sent: the share ``prompt`` at the end of its own backward, the rest after the
    backward of component ``index`` (its own index if there is no rest)."""

    prompt: float
    index: int


def releases(graph: LayerGraph) -> tuple[Release, ...]:
    """One :class:`Release` per component, in the order of the graph."""
    limit = constant("ddp_first_bucket_bytes")
    opened = 0.0
    unsent: list[float] = [0.0] * len(graph)
    closed_in: list[int] = [0] * len(graph)
    waiting: list[int] = []
    for i in range(len(graph) - 1, -1, -1):
        component = graph.components[i]
        size = component.parameter_bytes / max(1, component.num_parameter_tensors)
        open_bytes = 0.0
        for _ in range(component.num_parameter_tensors):
            opened += size
            open_bytes += size
            if opened >= limit:
                for j in waiting:
                    closed_in[j] = i
                waiting, opened, open_bytes = [], 0.0, 0.0
                limit = constant("ddp_bucket_bytes")
        unsent[i] = open_bytes
        if open_bytes > 0:
            waiting.append(i)
    # The bucket that is still open after the first component is sent then: index 0, the default above.
    released = []
    for i, component in enumerate(graph.components):
        if i == 0 or unsent[i] <= 0 or not component.parameter_bytes:
            released.append(Release(prompt=1.0, index=i))
        else:
            released.append(Release(prompt=1 - unsent[i] / component.parameter_bytes, index=closed_in[i]))
    for i in range(len(released) - 2, -1, -1):
        # A component without gradients does not fill a bucket: indices never fall from one component to the next.
        released[i] = Release(prompt=released[i].prompt, index=min(released[i].index, released[i + 1].index))
    return tuple(released)


def bucket_bytes(graph: LayerGraph, parameter_bytes: float, num_tensors: int) -> float:
    """Bytes of the messages in which a component's gradients are sent: a bucket, or its own tensors if larger."""
    bucket = min(constant("ddp_bucket_bytes"), max(1.0, float(graph.parameter_bytes)))
    return max(bucket, parameter_bytes / max(1, num_tensors))


def wrapper_seconds(graph: LayerGraph, links: Links, ranks: int, stride: int) -> float:
    """Seconds per step that a DDP wrapper needs for its small first and half-full last bucket, beyond the time of the
    same bytes in full buckets."""
    if ranks == 1:
        return 0.0
    total = max(1.0, float(graph.parameter_bytes))

    def seconds(size: float) -> float:
        return links.seconds(Collective(op="all_reduce", phase="gradient", bytes=size, ranks=ranks, stride=stride))

    first = min(constant("ddp_first_bucket_bytes"), total)
    bucket = bucket_bytes(graph, 0.0, 1)
    return 1.5 * max(0.0, seconds(first) - seconds(bucket) * first / bucket)


def remaining(name: CompressionName, moved: Collective, num_tensors: int, *, whole: bool) -> float:
    """The share of its bytes that a collective still moves under compression ``name``; 1 if it moves no gradients.

    ``whole``: each rank has whole gradients, as in the buckets of DDP; PowerSGD compresses only these, into two
    low-rank factors. The factors of a tensor of n elements together have at least ``2 sqrt(n)`` rows; the share is
    computed with this bound. Vogels et al. 2019, "PowerSGD".
    """
    if moved.phase != "gradient" or name == "none":
        return 1.0
    if name != "powersgd":
        return 0.5
    elements = moved.bytes / _WORD / max(1, num_tensors)
    return min(1.0, 2 * POWERSGD_RANK / sqrt(max(1.0, elements))) if whole else 1.0
