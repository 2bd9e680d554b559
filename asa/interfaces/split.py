"""What a tensor-parallel component's ranks hold and compute, however its activations lie between the split layers."""

from __future__ import annotations

from asa.ir.graph import Component
from asa.ir.layout import largest_shard
from asa.ir.traffic import Share


def split_refusal(component: Component, degree: int) -> str:
    """Why its weights cannot be split that far; empty when they can: nothing to split, or more ranks than its narrowest
    cut has units."""
    split = component.split
    if split is None:
        return f"{component.name} cannot be split: {component.why_whole or 'no layer with a cut'}"
    if degree > split.max_degree:
        return f"{component.name} splits at most {split.max_degree} ways, asked {degree}"
    return ""


def split_share(component: Component, degree: int) -> Share:
    """The largest shard: uneven cuts round up, at the narrowest cut's granularity."""
    split = component.split
    if split is None or degree == 1:
        fraction, parameters, flops, saved = 1.0, 0.0, 0.0, 0.0
    else:
        fraction = largest_shard(split.max_degree, degree) / split.max_degree
        parameters, flops, saved = split.parameter_bytes, split.flops_per_sample, split.saved_bytes_per_sample
    lost = 1 - fraction
    # Of what is cut the largest is so much less; of what is not, none is larger than all of it.
    largest, uncut = component.largest_parameter_bytes, component.parameter_bytes - parameters
    return Share(
        parameter_bytes=component.parameter_bytes - lost * parameters,
        largest_parameter_bytes=max(largest * fraction, min(largest, uncut)),
        num_parameter_tensors=component.num_parameter_tensors,
        buffer_bytes=component.buffer_bytes,
        flops_per_sample=component.flops_per_sample - lost * flops,
        saved_bytes_per_sample=component.saved_bytes_per_sample - lost * saved,
    )
