"""Estimated profile of a device without measurements, from FLOPs, bytes and efficiencies. Errors are tens of per cent.

Per component and pass, with F the FLOPs and D the bytes read and written,

    time = dispatch + F / (efficiency_F * peak) + F / (intensity * bandwidth) + D / (efficiency_D * bandwidth)

FLOPs of fused attention take longer by a factor, because exponentials and products take turns in it.
The terms are added because kernels bound by arithmetic (products, convolutions) alternate with kernels bound by memory
(normalisation, activations). Products load a byte of operands for every ``intensity`` FLOPs, so they reach 0.85 of peak
on the fp32 cores of a V100, and 0.54 on the tensor cores of an H200; where a device states what they reach in training
at half precision, that holds instead. On a GPU a pass takes at least as long as its host
needs to launch it, module by module. Forward writes and reads its saved bytes and its output once, and reads its
parameters; backward has twice the FLOPs and twice the bytes. Fused attention saves no scores, so its backward computes
them again: 2.5 times the FLOPs. Sources: ``asa/data/constants.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asa.cost.constants import constant
from asa.errors import InvalidInputError
from asa.ir.chips import may_be_alike
from asa.ir.cluster import Cluster, Device
from asa.ir.graph import Component, LayerGraph, SequenceSplit
from asa.ir.profile import DeviceRecord, Precision, Profile, Provenance, Stat, Timing
from asa.ir.units import MOST_SECONDS

_BACKWARD = 2.0
_ATTENTION_BACKWARD = 2.5
"""Products of fused attention in backward, over those in forward: five to two (Dao 2023, FlashAttention-2)."""

_BUSY = 4096
"""Samples for which the compute of a pass on a GPU takes longer than its launch by the host."""


def estimate(
    graph: LayerGraph,
    device: Device,
    *,
    model_spec: str,
    model_fingerprint: str,
    precision: Precision = "fp32",
    global_batch: int = 256,
    max_degree: int = 8,
    activation_scale: float = 1.0,
    trained_on_one: bool = False,
) -> Profile:
    """The profile that is expected on ``device``, of origin ``estimated``.

    ``activation_scale`` converts the graph's activation bytes to those at ``precision`` (0.5 from fp32 to bf16).
    ``trained_on_one``: the model is known to train on a batch of one sample. If not, components with BatchNorm get no
    time for one sample, so every rank gets at least two: torch refuses statistics of a single value.

    Raises:
        InvalidInputError: the device states no peak or no memory bandwidth, or a component would take too long on it.
    """
    peak = device.peak_flops(precision)
    if peak <= 0 or device.memory_bandwidth <= 0:
        kind = precision if precision in ("fp32", "tf32") else "bf16"
        raise InvalidInputError(
            f"device {device.name} states no {kind} peak or no memory bandwidth, so nothing can be estimated for it; "
            "take another --precision, or profile on it instead"
        )
    dispatch = constant("estimate_dispatch_cpu_s" if device.type == "cpu" else "estimate_dispatch_cuda_s")
    launch = 0.0 if device.type == "cpu" else constant("estimate_launch_cuda_s")
    # Beyond the two largest batches times are extrapolated from these, so compute must exceed the launch there.
    most = global_batch if device.type == "cpu" else max(global_batch, _BUSY)
    batches = [2**k for k in range(max(1, most).bit_length())]
    timings, by_tokens = [], []
    for component, early in zip(graph.components, _early_gradients(graph.components), strict=True):
        sequence = component.split.sequence if component.split is not None else None
        fewest = 2 if component.batch_norm and not trained_on_one else 1
        for degree in _degrees(component, max_degree):
            for samples in [n for n in batches if n >= fewest] or [fewest]:
                timing = _timing(component, samples, degree, device, precision, dispatch, launch, activation_scale)
                timings.append(replace(timing, transient_bytes=timing.transient_bytes + early))
            if sequence is not None and 1 < degree <= sequence.tokens:
                cut = _by_tokens(component, sequence, degree)
                by_tokens += [
                    _timing(cut, n, degree, device, precision, dispatch, launch, activation_scale) for n in batches
                ]
    return Profile(
        model_spec=model_spec,
        model_fingerprint=model_fingerprint,
        graph=graph,
        device=DeviceRecord(type=device.type, name=device.name, memory_bytes=device.memory_bytes, threads=1),
        precision=precision,
        global_batch=global_batch,
        timings=tuple(timings),
        by_tokens=tuple(by_tokens) or None,
        updates=(),
        dispatch_floor_s=dispatch,
        whole=(),
        skipped=("nothing was measured: times are estimates",),
        provenance=Provenance(
            origin="estimated",
            created="",
            asa_version="",
            torch_version="",
            note=f"from FLOPs and bytes at the efficiencies of asa/data/constants.json, on {device.name}",
        ),
    )


def on_device(profile: Profile, cluster: Cluster) -> Profile:
    """``profile`` itself if it was measured on devices like the cluster's, else an estimate from its graph.

    Raises:
        InvalidInputError: an estimate is needed but impossible: see :func:`estimate`.
    """
    if measured_on(profile, cluster):
        return profile
    return estimate(
        profile.graph,
        cluster.device,
        model_spec=profile.model_spec,
        model_fingerprint=profile.model_fingerprint,
        precision=profile.precision,
        global_batch=profile.global_batch,
        max_degree=cluster.num_devices,
        trained_on_one=trained_on_one(profile),
    )


def measured_on(profile: Profile, cluster: Cluster) -> bool:
    """Whether times of ``profile`` hold for ``cluster``: both are of processors, or of GPUs that may be of one chip."""
    kind, name = profile.device.type, profile.device.name
    return kind == cluster.device.type and may_be_alike(kind, name, cluster.device.name)


def trained_on_one(profile: Profile) -> bool:
    """Whether every component with BatchNorm was timed with one sample."""
    seen = {t.component for t in profile.timings if t.microbatch == 1}
    return all(c.name in seen for c in profile.graph.components if c.batch_norm)


def _early_gradients(components: Sequence[Component]) -> list[int]:
    """For each component, an upper bound on the bytes that gradients of shared parameters take in its backward beside
    those of its own parameters: such a gradient begins where the parameter is used last, and ends at its holder."""
    tied = [i for i, c in enumerate(components) if c.tied]
    sizes = [(j, components[j].largest_parameter_bytes) for j in tied[:-1]]
    return [sum(size for j, size in sizes if j <= i <= tied[-1]) for i in range(len(components))]


def _degrees(component: Component, most: int) -> list[int]:
    if component.split is None:
        return [1]
    return [2**k for k in range(min(most, component.split.max_degree).bit_length())]


def _by_tokens(component: Component, sequence: SequenceSplit, degree: int) -> Component:
    """A copy of ``component`` with the saved and output bytes of a rank under sequence parallelism."""
    handed = component.output_bytes_per_sample * (sequence.share(degree) if sequence.exit else 1.0)
    saved = max(0.0, component.saved_bytes_per_sample - sequence.spared(degree))
    return replace(component, saved_bytes_per_sample=saved, output_bytes_per_sample=handed)


def _per_flop(device: Device, precision: Precision) -> float:
    """Seconds of a FLOP of products."""
    peak = device.peak_flops(precision)
    if device.product_share and precision in ("bf16", "fp16"):
        return 1 / (device.product_share * peak)
    operands = constant("estimate_flops_per_byte") * device.memory_bandwidth
    return 1 / (constant("estimate_flops_efficiency") * peak) + 1 / operands


def _timing(
    component: Component, samples: int, degree: int, device: Device, precision: Precision, dispatch: float,
    launch: float, scale: float,
) -> Timing:  # fmt: skip
    split = component.split
    lost = 1 - 1 / degree
    flops, parameters, saved = component.flops_per_sample, component.parameter_bytes, component.saved_bytes_per_sample
    attention = min(flops, component.attention_flops_per_sample)
    if split is not None:
        attention -= lost * min(attention, split.flops_per_sample)
        flops -= lost * split.flops_per_sample
        parameters = round(parameters - lost * split.parameter_bytes)
        saved -= lost * split.saved_bytes_per_sample
    saved *= scale
    handed = component.output_bytes_per_sample * scale
    moved = samples * 2 * (saved + handed) + parameters
    per_flop = samples * _per_flop(device, precision)
    spared = component.spared_flops(degree) * per_flop
    fused = attention * per_flop / constant("estimate_attention_efficiency")
    products = max(0.0, flops - attention) * per_flop
    traffic = moved / (constant("estimate_bandwidth_efficiency") * device.memory_bandwidth)
    forward = dispatch + products + fused + traffic
    backward = _BACKWARD * (dispatch + products + traffic) + _ATTENTION_BACKWARD * fused
    host = launch * len(component.modules)
    spared = max(host, forward) - max(host, forward - spared)
    if not backward <= MOST_SECONDS:
        raise InvalidInputError(
            f"{component.name} would take {backward:.3g} s for a backward of {samples} samples on {device.name} of "
            f"{device.peak_flops(precision):.3g} FLOPs and {device.memory_bandwidth:.3g} bytes per second: correct "
            "the component's FLOPs and bytes, or the device's peaks"
        )
    return Timing(
        component=component.name,
        microbatch=samples,
        tensor_degree=degree,
        forward=_guess(max(host, forward)),
        backward=_guess(max(host, backward)),
        saved_bytes=round(samples * saved),
        transient_bytes=round(samples * (2 * handed + saved / 2)),
        spared_s=spared,
    )


def _guess(seconds: float) -> Stat:
    return Stat(median=seconds, p10=seconds, p90=seconds, n=1)
