"""What one rank holds and computes of a tensor-parallel component, with or without sequence parallelism."""

from __future__ import annotations

from asa.ir.graph import Component
from asa.ir.layout import largest_shard
from asa.ir.traffic import Share


def split_refusal(component: Component, degree: int) -> str:
    """Reason why the component's weights cannot be split over ``degree`` ranks: it has nothing to split, or its
    narrowest split dimension has fewer units than that. Empty if they can."""
    split = component.split
    if split is None:
        return f"{component.name} cannot be split: {component.why_whole or 'no layer with a cut'}"
    if degree > split.max_degree:
        return f"{component.name} splits at most {split.max_degree} ways, asked {degree}"
    return ""


def split_share(component: Component, degree: int) -> Share:
    """The largest shard. Uneven cuts round up, at the granularity of the narrowest split dimension."""
    split = component.split
    if split is None or degree == 1:
        fraction, parameters, flops, saved = 1.0, 0.0, 0.0, 0.0
    else:
        fraction = largest_shard(split.max_degree, degree) / split.max_degree
        parameters, flops, saved = split.parameter_bytes, split.flops_per_sample, split.saved_bytes_per_sample
    lost = 1 - fraction
    # A split tensor shrinks by the fraction; a tensor that is not split is at most all of the unsplit bytes.
    largest, uncut = component.largest_parameter_bytes, component.parameter_bytes - parameters
    return Share(
        parameter_bytes=component.parameter_bytes - lost * parameters,
        largest_parameter_bytes=max(largest * fraction, min(largest, uncut)),
        num_parameter_tensors=component.num_parameter_tensors,
        buffer_bytes=component.buffer_bytes,
        flops_per_sample=component.flops_per_sample - lost * flops,
        saved_bytes_per_sample=component.saved_bytes_per_sample - lost * saved,
    )
