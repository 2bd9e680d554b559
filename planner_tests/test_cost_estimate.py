"""Estimated times of products, and of fused attention."""

from __future__ import annotations

from dataclasses import replace

import known_models
import pytest

from asa.cost.constants import constant
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate

CLUSTER = presets.load("h200-nvlink-8")
GRAPH = known_models.profile(known_models.vgg16(32), 4000.0, 64).graph
PART = next(c for c in GRAPH.components if c.split is not None and c.split.flops_per_sample == c.flops_per_sample)


def timing(attention, degree=1, samples=4096):
    parts = [replace(c, attention_flops_per_sample=attention) if c is PART else c for c in GRAPH.components]
    found = estimate(
        replace(GRAPH, components=tuple(parts)), CLUSTER.device, model_spec="vgg16", model_fingerprint="0" * 16,
        precision="bf16", global_batch=samples,
    )  # fmt: skip
    key = (PART.name, samples, degree)
    return next(t for t in found.timings if (t.component, t.microbatch, t.tensor_degree) == key)


@pytest.mark.parametrize("degree", [1, 2])
def test_attention_computes_its_scores_again_in_backward(degree):
    plain, fused = timing(0.0, degree), timing(PART.flops_per_sample, degree)
    peak, bandwidth = CLUSTER.device.peak_bf16_flops, CLUSTER.device.memory_bandwidth
    per_flop = 1 / (constant("estimate_flops_efficiency") * peak)
    per_flop += 1 / (constant("estimate_flops_per_byte") * bandwidth)
    seconds = 4096 * PART.flops_per_sample / degree * per_flop
    slower = seconds / constant("estimate_attention_efficiency")
    assert fused.forward.median - plain.forward.median == pytest.approx(slower - seconds)
    assert fused.backward.median - plain.backward.median == pytest.approx(2.5 * slower - 2 * seconds)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_second_forward_leaves_out_products(degree):
    parts = tuple(
        replace(c, spared_flops_per_sample=c.flops_per_sample / 4) if c is PART else c for c in GRAPH.components
    )
    found = estimate(
        replace(GRAPH, components=parts), CLUSTER.device, model_spec="vgg16", model_fingerprint="0" * 16,
        precision="bf16", global_batch=4096,
    )  # fmt: skip
    spared = {(t.component, t.microbatch, t.tensor_degree): t.spared_s for t in found.timings}
    peak, bandwidth = CLUSTER.device.peak_bf16_flops, CLUSTER.device.memory_bandwidth
    per_flop = 1 / (constant("estimate_flops_efficiency") * peak)
    per_flop += 1 / (constant("estimate_flops_per_byte") * bandwidth)
    assert spared[PART.name, 4096, degree] == pytest.approx(4096 * PART.flops_per_sample / 4 / degree * per_flop)


def test_attention_is_at_most_all_that_a_component_computes():
    assert timing(2 * PART.flops_per_sample) == timing(PART.flops_per_sample)


def test_products_take_what_the_device_is_known_to_reach_at_half_precision():
    known = replace(CLUSTER.device, product_share=0.5)

    def seconds(device, precision):
        found = estimate(
            GRAPH, device, model_spec="vgg16", model_fingerprint="0" * 16, precision=precision, global_batch=4096
        )
        return next(t for t in found.timings if t.component == PART.name and t.microbatch == 4096).forward.median

    peak, bandwidth = CLUSTER.device.peak_bf16_flops, CLUSTER.device.memory_bandwidth
    taken = 1 / (constant("estimate_flops_efficiency") * peak)
    taken += 1 / (constant("estimate_flops_per_byte") * bandwidth)
    less = 4096 * PART.flops_per_sample * (taken - 1 / (0.5 * peak))
    assert seconds(CLUSTER.device, "bf16") - seconds(known, "bf16") == pytest.approx(less)
    assert seconds(CLUSTER.device, "fp32") == seconds(known, "fp32")


def test_a_share_above_the_peak_is_refused():
    with pytest.raises(ValueError, match=r"product_share of 1\.2, not 0 to 1"):
        replace(CLUSTER.device, product_share=1.2)
