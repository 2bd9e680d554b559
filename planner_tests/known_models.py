"""Chains of well-known models, from their published shapes: parameters, FLOPs and activations by arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from asa.ir.graph import Component, InnerCollective, LayerGraph, TensorSplit
from asa.ir.profile import DeviceRecord, Profile, Provenance, Stat, Timing, WholeStep


def _component(
    name: str, parameters: float, flops: float, out: float, saved: float, *, tensors: int, norm: bool, split: int
) -> Component:
    """``parameters``, ``out`` and ``saved`` in elements of 4 bytes; ``split``: widest tensor split, 0 for none."""
    whole = None
    if split:
        whole = TensorSplit(
            max_degree=split,
            parameter_bytes=int(4 * parameters),
            num_parameter_tensors=tensors,
            flops_per_sample=float(flops),
            saved_bytes_per_sample=4.0 * saved,
            collectives=(InnerCollective(op="all_reduce", phase="forward", bytes_per_sample=4.0 * out),),
            entry_partial=True,
            exit_partial=False,
        )
    return Component(
        name=name,
        kind="convolution" if norm else "linear",
        modules=(name,),
        num_parameter_tensors=tensors,
        parameter_bytes=int(4 * parameters),
        largest_parameter_bytes=int(4 * parameters),
        buffer_bytes=0,
        flops_per_sample=float(flops),
        output_bytes_per_sample=4.0 * out,
        saved_bytes_per_sample=4.0 * saved,
        batch_norm=norm,
        split=whole,
        why_whole="" if whole else "too narrow",
    )


def resnet50(pixels: int = 224, classes: int = 1000) -> LayerGraph:
    """Stem, 16 bottlenecks, classifier."""
    side = pixels // 4
    parts = [
        _component(
            "stem", 9408 + 128, 2 * 9408 * (pixels // 2) ** 2, 64 * side**2, 3 * 64 * (pixels // 2) ** 2,
            tensors=3, norm=True, split=0,
        )
    ]  # fmt: skip
    width_in = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for block in range(blocks):
            if stage > 1 and block == 0:
                side //= 2
            out = 4 * width
            weights = width_in * width + 9 * width * width + width * out + (width_in * out if block == 0 else 0)
            norms = 2 * (2 * width + out + (out if block == 0 else 0))
            parts.append(
                _component(
                    f"layer{stage}.{block}", weights + norms, 2 * weights * side**2, out * side**2,
                    (4 * width + 3 * out) * side**2, tensors=12 if block == 0 else 9, norm=True, split=width,
                )
            )  # fmt: skip
            width_in = out
    parts.append(
        _component("classifier", 2048 * classes + classes, 2 * 2048 * classes, classes, 2048, tensors=2, norm=False,
                   split=classes)
    )  # fmt: skip
    return _graph("resnet50", pixels, classes, parts)


def vgg16(pixels: int = 224, classes: int = 1000) -> LayerGraph:
    """13 convolutions and the classifier of three linears (its input is 7x7 whatever the image)."""
    parts, side, before, index = [], pixels, 3, 0
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            side, index = max(1, side // 2), index + 1
            continue
        weights = 9 * before * width
        parts.append(
            _component(f"features.{index}", weights + width, 2 * weights * side**2, width * side**2,
                       2 * width * side**2, tensors=2, norm=False, split=width)
        )  # fmt: skip
        before, index = width, index + 2
    weights = 25088 * 4096 + 4096 * 4096 + 4096 * classes
    parts.append(
        _component("classifier", weights + 8192 + classes, 2 * weights, classes, 25088 + 4 * 4096, tensors=6,
                   norm=False, split=classes)
    )  # fmt: skip
    return _graph("vgg16", pixels, classes, parts)


def transformer(blocks: int = 12, width: int = 768, tokens: int = 197) -> LayerGraph:
    """An embedding, equal encoder blocks, and a head, as in ViT-B/16."""
    parts = [_component("embedding", 768 * width, 2 * 768 * width * tokens, width * tokens, width * tokens, tensors=4,
                        norm=False, split=0)]  # fmt: skip
    for i in range(blocks):
        weights = 12 * width * width
        flops = 2 * weights * tokens + 4 * tokens * tokens * width
        parts.append(
            _component(f"encoder.{i}", weights + 13 * width, flops, width * tokens, 16 * width * tokens, tensors=12,
                       norm=False, split=12)
        )  # fmt: skip
    parts.append(_component("head", width * 1000, 2 * width * 1000, 1000, width, tensors=2, norm=False, split=1000))
    return _graph("vit", 224, 1000, parts)


def _graph(name: str, pixels: int, classes: int, parts: list[Component]) -> LayerGraph:
    return LayerGraph(
        model=name,
        input_shape=(3, pixels, pixels),
        num_classes=classes,
        input_bytes_per_sample=12.0 * pixels**2,
        components=tuple(parts),
    )


def profile(
    graph: LayerGraph,
    samples_per_s: float,
    batch: int,
    *,
    spread: float = 0.02,
    floor_s: float = 1e-4,
    device: Literal["cpu", "cuda"] = "cuda",
    memory_bytes: int = 80 * 2**30,
    scale: Callable[[str], float] = lambda name: 1.0,
) -> Profile:
    """A profile whose whole step at ``batch`` runs at ``samples_per_s``; FLOPs decide a component's part of it."""
    total = sum(c.flops_per_sample for c in graph.components)
    step = batch / samples_per_s - 2 * len(graph) * floor_s

    def stat(seconds: float) -> Stat:
        return Stat(median=seconds, p10=seconds * (1 - 1.28 * spread), p90=seconds * (1 + 1.28 * spread), n=20)

    timings = []
    for c in graph.components:
        for degree in (1, 2, 4, 8):
            if degree > 1 and (c.split is None or degree > c.split.max_degree):
                continue
            for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                seconds = scale(c.name) * step * m / batch * c.flops_per_sample / total / degree
                timings.append(
                    Timing(
                        component=c.name,
                        microbatch=m,
                        tensor_degree=degree,
                        forward=stat(floor_s + seconds / 3),
                        backward=stat(floor_s + 2 * seconds / 3),
                        saved_bytes=int(m * c.saved_bytes_per_sample / degree),
                        transient_bytes=int(2 * m * c.output_bytes_per_sample),
                    )
                )
    whole = batch / samples_per_s
    return Profile(
        model_spec=graph.model,
        model_fingerprint="0123456789abcdef",
        graph=graph,
        device=DeviceRecord(
            type="cuda" if device == "cuda" else "cpu", name="test", memory_bytes=memory_bytes, threads=1
        ),
        precision="fp32",
        global_batch=batch,
        timings=tuple(timings),
        updates=(),
        dispatch_floor_s=floor_s,
        whole=(WholeStep(microbatch=batch, whole=stat(whole), components_s=whole),),
        skipped=(),
        provenance=Provenance(origin="measured", created="", asa_version="", torch_version=""),
    )
