"""Plans of models with a parameter that several components use, for fewer samples than devices."""

from __future__ import annotations

from dataclasses import replace

import known_models

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.ir.plan import ONE_COPY, DataDegree
from asa.ir.profile import Profile
from asa.planner import Request, plan, verify
from asa.strategies import offered


def shared() -> Profile:
    """A transformer whose head has the embedding's matrix."""
    graph = known_models.transformer(2, 1024, 64)
    first, *blocks, last = graph.components
    size = 4 * 50_000 * 1024
    first = replace(first, tied=True, parameter_bytes=size, largest_parameter_bytes=size)
    last = replace(last, tied=True, split=None, why_whole="shared", parameter_bytes=0, flops_per_sample=2e9)
    parts = (first, *blocks, last)
    return known_models.profile(replace(graph, components=parts, uncut=tuple(range(1, len(parts)))), 20.0, 4)


def test_with_fewer_samples_than_devices_no_state_of_a_shared_parameter_is_kept_twice_if_that_is_slower() -> None:
    profile, cluster = shared(), presets.load("a100-nvlink-8")
    request = Request(gpus=4, global_batch=2, optimizer="adamw", prefer_simple=False, time_limit_s=0.5)
    found = plan(profile, cluster, offered(), request)[0]
    first, *others = found.components
    assert (len(found.stages[0].ranks), first.data.degree, others[-1].data.degree) == (4, 2, 2)
    for strategy in ("replicate", "zero1", "zero2", "zero3"):
        other = replace(found, components=(replace(first, data=DataDegree(strategy=strategy, degree=2)), *others))
        assert verify(other, profile, cluster, offered()).step_time_s >= found.certificate.lower_bound_s
    assert "components that share a parameter" in found.certificate.space


def test_where_summing_a_shared_gradient_takes_long_its_components_compute_the_same_samples_on_all_ranks() -> None:
    profile, cluster = shared(), presets.load("4090-pcie-4")
    first, *blocks, last = profile.graph.components
    blocks = [
        replace(
            b, parameter_bytes=4096, largest_parameter_bytes=4096, output_bytes_per_sample=1e5, split=None,
            flops_per_sample=1e11,
        )
        for b in blocks
    ]  # fmt: skip
    first, last = replace(first, output_bytes_per_sample=1e5), replace(last, flops_per_sample=1e6)
    graph = replace(profile.graph, components=(first, *blocks, last))
    profile = estimate(graph, cluster.device, model_spec="shared", model_fingerprint="0" * 16, max_degree=4)
    request = Request(gpus=4, global_batch=16, optimizer="adamw", prefer_simple=False, time_limit_s=0.5)
    found = plan(profile, cluster, offered(), request)[0]
    tied, *others = found.components
    assert (tied.data, others[-1].data) == (ONE_COPY, ONE_COPY)
    assert {c.data.degree for c in others[:-1]} == {4}
