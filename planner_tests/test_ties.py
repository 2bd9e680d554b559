"""Weights that two components share, and outputs that leave early: what may not be cut, and that it trains as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.errors import UsageError
from asa.executor.measuring.equivalence import verify
from asa.ir.plan import DataDegree, Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from planner_tests.hand_plans import hand_plan
from planner_tests.stage_plans import staged

SHAPE = (3, 4, 4)


class Tied(nn.Module):
    """An embedding, two blocks, and a decoder with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Flatten(1), nn.Linear(48, 12), nn.LayerNorm(12))
        self.encode = nn.Linear(12, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 20)) for _ in range(2))
        self.decode = nn.Linear(20, 12)
        self.transform = nn.Linear(20, 20)
        self.again = nn.Linear(12, 20)
        self.again.weight = self.encode.weight
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(self.before(x))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(self.again(self.decode(torch.relu(self.transform(x))))))


class Early(nn.Module):
    """A head that leaves in the middle, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(5))
        self.aux, self.head = nn.Linear(48, 10), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Any:
        x = torch.flatten(x, 1)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 2 and self.training:
                side = self.aux(x)
        return (self.head(x), side) if self.training else self.head(x)


def tied() -> nn.Module:
    torch.manual_seed(2)
    return Tied()


def traced(model: nn.Module) -> TracedModel:
    return trace(model, torch.zeros(2, *SHAPE), name="model")


def profile_of(model: nn.Module) -> Profile:
    found = traced(model)
    graph = layer_graph(found, model="model", input_shape=SHAPE, num_classes=10)
    return estimate(
        graph, presets.load("a100-nvlink-8").device, model_spec="model",
        model_fingerprint=found.model_fingerprint, global_batch=64,
    )  # fmt: skip


def hand(degrees: Any) -> Plan:
    return hand_plan(tied(), 2, degrees, input_shape=SHAPE, num_classes=10, global_batch=16)


def test_what_is_shared_has_one_home() -> None:
    model = tied()
    found = traced(model)
    sharing = [i for i, c in enumerate(found.components) if c.ties]
    assert len(sharing) == 2
    assert len(found.components) > 3
    assert "share parameters" in found.note
    held = [n for c in found.components for n, _ in c.named_parameters()]
    assert sorted(held) == sorted(n for n, _ in model.named_parameters()), "each once"
    assert found.uncut == set(range(sharing[0] + 1, sharing[1] + 1))
    x = torch.randn(3, *SHAPE)
    assert torch.equal(found.run(x), model(x))
    model.half()  # what refers to a weight goes with it
    assert {p.dtype for i in sharing for n, m in found.components[i].named_modules() for p in vars(m).values()
            if isinstance(p, nn.Parameter)} == {torch.float16}  # fmt: skip


def test_between_them_everything_may_be_split() -> None:
    names = [c.name for c in traced(tied()).components if c.ties]
    mixed = hand(lambda _i, name: (2, 1) if name in names else (1, 2))
    assert any(c.tensor.degree == 2 for c in mixed.components)
    for made in (mixed, hand(lambda _i, _n: (2, 1))):
        found = verify(made, tied, offered(), timeout_s=120)
        assert found.equivalent
        assert found.max_rel_error < 1e-9


def test_what_the_executor_refuses() -> None:
    alike = hand(lambda _i, _n: (2, 1))
    sharing = [i for i, c in enumerate(traced(tied()).components) if c.ties]
    apart = staged(alike, [1, 1], cuts=[sharing[1]])
    with pytest.raises(UsageError, match="share a parameter"):
        verify(apart, tied, offered(), timeout_s=120)
    apart_in_layout = list(alike.components)
    apart_in_layout[sharing[0]] = replace(alike.components[sharing[0]], data=DataDegree(strategy="replicate", degree=1))
    with pytest.raises(UsageError, match="share a parameter"):
        verify(replace(alike, components=tuple(apart_in_layout)), tied, offered(), timeout_s=120)


@pytest.mark.parametrize("build", [tied, Early])
@pytest.mark.parametrize("strategies", [None, ("1f1b",), ("fsdp",), ("tensor",)])
def test_no_plan_cuts_there(build: Any, strategies: tuple[str, ...] | None) -> None:
    profile = profile_of(build())
    assert profile.graph.uncut
    request = Request(gpus=2, global_batch=64, strategies=strategies, time_limit_s=2.0, top_k=3)
    for made in plan(profile, presets.load("a100-nvlink-8"), offered(), request):
        assert all(profile.graph.cuttable(start) for start in made.starts()[1:])
        for c, a in zip(profile.graph.components, made.components, strict=True):
            if c.tied:
                assert a.tensor.degree == 1
                assert strategies != ("fsdp",) or (a.data.strategy == "zero3") == (c.parameter_bytes > 0)
        ways = {
            (a.data.degree, a.stage) for c, a in zip(profile.graph.components, made.components, strict=True) if c.tied
        }
        assert len(ways) <= 1


def test_an_early_output_leaves_from_the_last_stage() -> None:
    found = traced(Early())
    side = next(i for i, c in enumerate(found.components) if c.has_sides())
    assert found.uncut == set(range(side + 1, len(found.components)))
