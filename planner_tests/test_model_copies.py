"""Copies of a model that is built once are what building it again would give."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asa.executor.measuring.model_copies import ModelCopies
from asa.tracing import TracedModel, trace
from asa.zoo.inputs import example
from asa.zoo.models import build
from planner_tests.hand_plans import hand_plan, uniform

INPUT, CLASSES = (3, 32, 32), 10


def _values(model: nn.Module | TracedModel) -> dict[str, Tensor]:
    parts = [model] if isinstance(model, nn.Module) else model.components
    return {n: t for part in parts for n, t in (*part.named_parameters(), *part.named_buffers())}


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


def _assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    assert len(a) > 2
    for name, value in a.items():
        assert value.dtype == b[name].dtype
        assert torch.equal(value, b[name]), name
        assert value.requires_grad == b[name].requires_grad


@pytest.mark.parametrize("spec", ["cnn", "lstm", "unet"])
def test_copies_are_equal_bit_for_bit_to_what_is_built_again(spec: str) -> None:
    factory = partial(build, spec, num_classes=CLASSES, input_shape=INPUT, seed=3)
    plan = replace(hand_plan(factory(), 1, uniform(1, 1), input_shape=INPUT, num_classes=CLASSES), model_spec=spec)
    copies = ModelCopies(plan, factory)
    torch.manual_seed(5)
    before = _random_state()
    first = copies.traced()
    for value in _values(first).values():
        value.data.fill_(1)  # as training does: neither the next copy nor the original may notice
    again, plain = copies.traced(), copies.module()
    assert _random_state() == before, "as after building, which restores it"
    _assert_equal(_values(again), _values(trace(factory(), example(INPUT), name=spec)))
    _assert_equal(_values(plain), _values(factory()))
    assert isinstance(again, TracedModel)
    assert again.model_fingerprint == plan.model_fingerprint
    x = torch.randn(2, *INPUT)
    torch.testing.assert_close(plain.eval()(x), factory().eval()(x), rtol=0, atol=0)


def test_the_model_is_built_once_unless_it_is_of_another_package() -> None:
    built: list[nn.Module] = []

    def factory() -> nn.Module:
        built.append(build("cnn", num_classes=CLASSES, input_shape=INPUT))
        return built[-1]

    plan = replace(hand_plan(factory(), 1, uniform(1, 1), input_shape=INPUT, num_classes=CLASSES), model_spec="cnn")
    for spec, times in (("cnn", 1), ("package.module:factory", 3)):
        built.clear()
        copies = ModelCopies(replace(plan, model_spec=spec), factory)
        handed = [copies.traced(), copies.traced(), copies.module()]
        assert len(built) == times
        assert len({id(model) for model in handed}) == 3
