"""Training under any plan equals training on one device, and the check that says so fails when it should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from tables import some
from torch import nn

from asa.executor.measuring import equivalence
from asa.executor.measuring.equivalence import confirmed, verify
from asa.ir.equivalence import Equivalence
from asa.ir.layout import Boundary
from asa.sharding.collectives import boundary
from asa.sharding.gradients import replicated
from asa.sharding.layers import batchnorm
from asa.strategies import offered
from planner_tests.hand_plans import Choose, alternating, hand_plan, model_of, uniform
from planner_tests.small_models import CLASSES, INPUT, MODELS, Auxiliary, build
from planner_tests.verified import STEPS, verified


def check(name: str, width: int, choose: Choose, **options: Any) -> Equivalence:
    samples, steps = options.pop("samples", None), options.pop("steps", STEPS)
    plan = hand_plan(model_of(name), width, choose, input_shape=INPUT, num_classes=CLASSES[name], **options)
    return verified(plan, name, samples=samples, steps=steps)


LAYOUTS: dict[str, tuple[int, Choose]] = {
    "ddp": (2, uniform(2, 1)), "tensor": (2, uniform(1, 2)), "uneven-tensor": (3, uniform(1, 3)),
    "mixed": (4, alternating(4)),
}  # fmt: skip
TESTED = [
    ("ddp", "blocks"), ("tensor", "perceptron"), ("tensor", "vision_transformer"), ("uneven-tensor", "plain"),
    ("uneven-tensor", "blocks"), *product(["mixed"], MODELS),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "name"), some(product(LAYOUTS, sorted(MODELS)), TESTED))
def test_plans_train_as_one_device_does(layout: str, name: str) -> None:
    found = check(name, *LAYOUTS[layout])
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_data_times_tensor_parallel_in_five_steps() -> None:
    """As many steps as a user's ``verify`` makes."""
    found = check("plain", 4, uniform(2, 2), steps=5)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
    assert (found.dtype, found.steps) == ("float64", 5)


def test_uneven_batches_and_microbatches() -> None:
    assert check("plain", 2, alternating(2), samples=7).equivalent
    assert check("blocks", 2, alternating(2, shift=1), samples=13, num_microbatches=2).equivalent


def test_a_batch_too_small_for_all_microbatches_is_cut_alike_on_one_device() -> None:
    """Of weights 3 and 1 every shard of 4 samples has one: 11 are 2 microbatches, not 5."""
    plan = hand_plan(
        model_of("blocks"), 2, uniform(2, 1), input_shape=INPUT, num_classes=10, global_batch=11, num_microbatches=5
    )  # fmt: skip
    plan = replace(plan, stages=(replace(plan.stages[0], weights=(3, 1)),))
    found = verify(plan, lambda: build("blocks"), offered(), timeout_s=120)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"


def test_adamw() -> None:
    assert check("vision_transformer", 2, alternating(2), optimizer="adamw").equivalent


def test_auxiliary_heads_cross_boundaries() -> None:
    def aux() -> nn.Module:
        torch.manual_seed(3)
        return Auxiliary()

    plan = hand_plan(aux(), 2, alternating(2), input_shape=INPUT, num_classes=10)
    assert len({c.data.degree for c in plan.components}) > 1
    assert verify(plan, aux, offered(), timeout_s=120).equivalent


def test_cut_tokens_train_as_one_device_does() -> None:
    """5 tokens over 2 of 4 ranks, dropout on all of them; the last block hands its class token on whole."""
    found = check(
        "vision_transformer", 4, uniform(2, 2), by_tokens=lambda _i: True, samples=7, num_microbatches=2,
        data_strategy=lambda i: ("zero3", "replicate")[i % 2],
    )  # fmt: skip
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_a_scaled_boundary_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = boundary.Crossing.backward
    monkeypatch.setattr(boundary.Crossing, "backward", lambda self, g, n: honest(self, g, n) * 1.001)
    found = check("plain", 2, lambda i, name: (1, 2) if "2." in name or name == "2" else (2, 1))
    assert not found.equivalent
    assert found.max_rel_error > 1e-6


def test_a_bucket_left_unreduced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = replicated.sender

    def sabotaged(axis: Any) -> Any:
        send = honest(axis)
        return lambda bucket: send(bucket) if bucket.number else lambda: None

    monkeypatch.setattr(replicated, "sender", sabotaged)
    assert not check("plain", 2, uniform(2, 1)).equivalent


def test_a_shifted_batch_norm_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = batchnorm._channel_sum
    monkeypatch.setattr(batchnorm, "_channel_sum", lambda x: honest(x) * (1 + 1e-4))
    assert not check("blocks", 2, uniform(2, 1)).equivalent


def test_sabotage_hooks_are_on_the_path() -> None:
    """The three tests above would pass for nothing if what they patch were never called."""
    plan = hand_plan(model_of("plain"), 2, lambda i, n: (1, 2) if "2." in n or n == "2" else (2, 1),
                     input_shape=INPUT, num_classes=100)  # fmt: skip
    layouts = plan.layouts()
    assert any(Boundary(source=a, target=b).gathers > 1 for a, b in pairwise(layouts))


@pytest.mark.parametrize(("name", "width"), [("blocks", 2), ("plain", 3)])
def test_fully_sharded_data_parallel(name: str, width: int) -> None:
    assert check(name, width, uniform(width, 1), data_strategy=lambda _i: "zero3").equivalent


def test_sharded_replicated_and_tensor_parallel_in_one_network() -> None:
    found = check("plain", 4, uniform(2, 2), data_strategy=lambda i: ("zero3", "replicate")[i % 2], num_microbatches=2)
    assert found.equivalent
    assert check("blocks", 4, alternating(4), data_strategy=lambda i: ("replicate", "zero3")[i % 2]).equivalent


def test_fp32_gradients_that_differ_on_one_batch_alone_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ReLU whose input is within rounding of zero; what is wrong in fp32 alone is wrong on every batch."""
    honest = boundary.Crossing.backward

    def crooked(self: Any, g: torch.Tensor, n: int) -> torch.Tensor:
        return honest(self, g, n) * (1.001 if g.dtype == torch.float32 else 1.0)

    monkeypatch.setattr(boundary.Crossing, "backward", crooked)
    found = check("plain", 2, lambda i, name: (1, 2) if "2." in name or name == "2" else (2, 1))
    assert found.max_rel_error < 1e-9
    assert not found.equivalent
    assert found.gradient_batches == 3

    asked: list[int] = []

    def gradients(first: int) -> tuple[float, float, str]:
        asked.append(first)
        return (1e-6, 1e-4, "w") if len(asked) == 2 else (1e-2, 1e-4, "w")

    second = confirmed(found, gradients)
    assert (second.equivalent, second.gradient_batches, second.gradient_error_fp32) == (True, 3, 1e-6)
    assert asked == [equivalence.STEPS, 2 * equivalence.STEPS]
    drifted = replace(found, loss_error=1e-3)
    assert confirmed(drifted, gradients) is drifted
    assert len(asked) == 2, "what differs in float64 is wrong, whatever fp32 says"
