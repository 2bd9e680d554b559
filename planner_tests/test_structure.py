"""Structure without values says of a model what running it says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import asa
from asa.errors import InvalidInputError, UsageError
from asa.sharding.layers.describe import layer_graph
from asa.sharding.layers.structure import _check_room, stripped, structure_of
from asa.tracing import trace
from asa.tracing.alike import signature, stand_ins
from asa.tracing.remembered import Remembered
from asa.zoo.inputs import example
from asa.zoo.models import build, default_input
from asa.zoo.sizes import SHAPES
from asa.zoo.without_values import on_meta

torch.set_num_threads(1)


def _structure(spec, shape, classes, precision="fp32"):
    make = partial(build, spec, num_classes=classes, input_shape=shape)

    def never():
        raise AssertionError("the model was built with its weights")

    return structure_of(
        partial(on_meta, make), never, example(shape), name=spec, num_classes=classes, precision=precision
    )


@pytest.mark.parametrize("spec", ["cnn", "unet", "gpt2:tiny"])
def test_structure_equals_what_running_shows(spec):
    shape, classes = default_input(spec)
    model = build(spec, num_classes=classes, input_shape=shape)
    traced = trace(model, example(shape), name=spec)
    graph = layer_graph(traced, model=spec, input_shape=shape, num_classes=classes)
    found = _structure(spec, shape, classes)
    assert replace(found.graph, notes=()) == replace(graph, notes=())
    assert found.fingerprint == traced.model_fingerprint


def test_structure_of_70_billion_parameters_allocates_none_of_them():
    shape = SHAPES["llama:70b"]
    found = _structure("llama:70b", (512,), shape.vocabulary)
    assert found.graph.parameter_bytes == pytest.approx(4 * 70.55e9, rel=0.001)
    assert len(found.graph) == shape.layers + 2
    blocks = found.graph.components[1:-1]
    assert {b.flops_per_sample for b in blocks} == {blocks[0].flops_per_sample}
    assert blocks[0].split is not None
    assert blocks[0].split.max_degree == shape.kv_heads
    assert blocks[0].split.sequence is not None


@pytest.mark.parametrize(("spec", "millions"), [("gpt2", 124.4), ("gpt2:medium", 354.8), ("gpt2:xl", 1557.6),
                                                ("llama:1b", 1235.8), ("llama:8b", 8030.3)])  # fmt: skip
def test_published_sizes_have_their_parameters(spec, millions):
    model = on_meta(partial(build, spec, num_classes=SHAPES[spec].vocabulary, input_shape=(64,)))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.001)


def test_half_precision_keeps_and_hands_on_less():
    whole, half = (_structure("gpt2:tiny", (64,), 256, precision).graph for precision in ("fp32", "bf16"))
    for a, b in zip(whole.components[1:-1], half.components[1:-1], strict=True):
        assert 0.5 * a.saved_bytes_per_sample < b.saved_bytes_per_sample < 0.8 * a.saved_bytes_per_sample
        assert [2 * y.bytes_per_sample for y in b.split.collectives if y.phase == "forward"] == [
            x.bytes_per_sample for x in a.split.collectives if x.phase == "forward"
        ]


def test_the_loss_of_tokens_is_in_the_memory_of_the_last_component():
    graph = _structure("llama:tiny", (64,), 256).graph
    assert graph.components[-1].saved_bytes_per_sample == 4 * 64 * 256


class _Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if float(x.detach().sum()) > 1e9 else self.first(x)


def test_a_model_that_asks_for_values_is_run():
    asked = []
    model = _Asks()
    found = structure_of(
        lambda: stripped(model), lambda: asked.append(1) or model, torch.zeros(2, 4), name="asks", num_classes=4
    )
    assert asked == [1]
    assert "depends on data" in " ".join(found.graph.notes)


class _Blocks(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 8)) for w in widths)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_are_alike_only_where_their_shapes_are():
    kinds = [signature(c) for c in trace(_Blocks([8, 8, 8, 8, 8, 16]), torch.zeros(2, 8), name="b").components]
    assert len(set(kinds)) == 2
    assert stand_ins(kinds) == [0, 1, 1, 1, 4, 5]


def test_a_stripped_model_holds_no_values_and_leaves_its_origin_alone():
    model = build("gpt2:tiny", num_classes=256, input_shape=(64,))
    bare = stripped(model)
    assert all(t.is_meta for t in (*bare.parameters(), *bare.buffers()))
    assert bare.head.weight is bare.embedding.tokens.weight
    assert not any(t.is_meta for t in model.parameters())


def test_a_model_without_weights_is_planned_for_a_cluster_that_is_elsewhere():
    shape = SHAPES["llama:1b"]
    model = on_meta(partial(build, "llama:1b", num_classes=shape.vocabulary, input_shape=(256,)))
    tokens = torch.zeros(2, 256, dtype=torch.int64)
    plan = asa.plan(model, tokens, gpus=8, cluster="h100-nvlink-8", precision="bf16", optimizer="adamw")
    assert (plan.num_classes, plan.origin, plan.input_shape) == (shape.vocabulary, "estimated", (256,))
    with pytest.raises(UsageError, match="name the cluster"):
        asa.plan(model, tokens, gpus=8)


def test_a_model_that_must_be_run_and_is_larger_than_the_machine_is_refused():
    large = nn.Module()
    large.weight = nn.Parameter(torch.empty(2**42, device="meta"))
    with pytest.raises(InvalidInputError, match="of this machine's"):
        _check_room(lambda: large, "large")
    _check_room(_Asks, "small")


class _Dropping(nn.Module):
    """A residual block that drops its branch, or its features, at rates of its own."""

    def __init__(self, rate: float, scale: float = 1.0, factor: float = 0.5) -> None:
        super().__init__()
        self.linear, self.drop, self.scale, self.factor = nn.Linear(16, 16), nn.Dropout(rate), scale, factor

    def forward(self, x):
        small = nn.functional.interpolate(x[:, None], scale_factor=self.factor)[:, 0]
        return x + self.drop(self.linear(x)) * self.scale + small.mean()


@pytest.mark.parametrize(("others", "equal"), [
    ({"rate": 0.25}, True), ({"rate": 0.3, "scale": 0.5}, False), ({"rate": 0.0}, False),
    ({"rate": 0.1, "factor": 0.25}, False),
])  # fmt: skip
def test_blocks_that_drop_more_often_are_equal_and_others_not(others, equal):
    first, second = (
        trace(nn.Sequential(_Dropping(**given)), torch.randn(2, 16), name="one").components[0]
        for given in ({"rate": 0.1}, others)
    )
    assert (signature(first) == signature(second)) is equal


def test_operators_asked_once_say_what_they_said():
    x, y = torch.randn(2, 3, 8, 8, device="meta"), torch.randn(3, 3, 8, 8, device="meta")
    norm, convolution = nn.BatchNorm2d(3, device="meta"), nn.Conv2d(3, 4, 3, device="meta")

    def results(a):
        out = convolution(norm(a).relu_().to(memory_format=torch.channels_last))
        values = (out, out.half(), out.add_(1), *out.topk(2), out[0])
        return [(t.shape, t.stride(), t.dtype, t._version) for t in values]

    plain = results(x), results(y), results(x)
    with Remembered() as mode:
        assert (results(x), results(y), results(x)) == plain
    assert mode.spared > 0


def test_weights_that_are_not_trained_are_counted_and_the_plan_says_so():
    def adapter() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 10))
        model[0].requires_grad_(False)
        return model

    found = structure_of(adapter, adapter, torch.zeros(2, 64), name="adapter", num_classes=10)
    (note,) = found.graph.notes
    assert note.startswith("87% of the weights are not trained; their gradients")
    trained = structure_of(
        lambda: adapter().requires_grad_(), lambda: adapter().requires_grad_(), torch.zeros(2, 64), name="whole",
        num_classes=10,
    )  # fmt: skip
    assert trained.graph.notes == ()
