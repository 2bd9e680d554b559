"""Optimizer steps per component, and the cost of a launch."""

from __future__ import annotations

import torch
from torch import nn

from asa.profiler.updates import OPTIMIZERS, build_optimizer, measure_dispatch, measure_updates

CPU = torch.device("cpu")


def _shards() -> dict[int, dict[str, nn.Module]]:
    whole = {"a": nn.Linear(8, 8), "flat": nn.Flatten(), "b": nn.Linear(16, 4)}
    return {1: whole, 2: {"a": nn.Linear(4, 8)}}


def test_every_component_with_parameters_is_timed_under_every_optimizer_and_degree():
    found = measure_updates(_shards(), CPU, slice_s=0.0)
    expected = {(o, n, t) for o in OPTIMIZERS for n, t in (("a", 1), ("b", 1), ("a", 2))}
    assert {(u.optimizer, u.component, u.tensor_degree) for u in found} == expected
    assert len(found) == len(expected)
    assert all(u.step.median > 0 and u.step.n >= 3 for u in found)


def test_times_of_a_fused_step_keep_their_proportions():
    found = measure_updates(_shards(), CPU, slice_s=0.0, fused=True)
    assert {(u.optimizer, u.component, u.tensor_degree) for u in found} == {
        (o, n, t) for o in OPTIMIZERS for n, t in (("a", 1), ("b", 1), ("a", 2))
    }
    assert all(0 < u.step.p10 <= u.step.median <= u.step.p90 for u in found)


def test_weights_stay_and_gradients_go():
    shards = _shards()
    before = {n: [p.clone() for p in m.parameters()] for n, m in shards[1].items()}
    measure_updates(shards, CPU, slice_s=0.0)
    for name, module in shards[1].items():
        for p, q in zip(module.parameters(), before[name], strict=True):
            assert torch.equal(p, q)
            assert p.grad is None


def test_frozen_parameters_are_not_updated():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert {u.component for u in measure_updates({1: {"frozen": frozen, "b": nn.Linear(2, 2)}}, CPU, slice_s=0.0)} == {
        "b"
    }


def test_the_optimizers_are_those_of_a_run():
    p = [nn.Parameter(torch.ones(2))]
    sgd, adamw = (build_optimizer(name, p) for name in OPTIMIZERS)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.9
    assert isinstance(adamw, torch.optim.AdamW)


def test_a_launch_takes_time():
    assert 0 < measure_dispatch(CPU, slice_s=0.0) < 1
