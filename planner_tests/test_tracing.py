"""torchvision's models as chains of components: what they are called, and that they compute what the model does."""

from __future__ import annotations

import copy
from typing import Any

import networkx as nx
import pytest
import torch
import torchvision
from tables import some
from torch import Tensor, fx, nn
from tracing_checks import assert_bitwise, buffers

from asa.tracing import TracedModel, trace

RESNET50 = ["stem", *(f"layer{i}.{j}" for i, n in ((1, 3), (2, 4), (3, 6), (4, 3)) for j in range(n)), "classifier"]
DENSE = [f"features.{kind}{i}" for i in range(1, 5) for kind in ("denseblock", "transition")][:-1]
INCEPTION = [f"inception{i}" for i in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")]
EXPECTED: dict[str, list[str] | int] = {
    "resnet50": RESNET50,
    "vit_b_16": ["embedding", *(f"encoder.layers.encoder_layer_{i}" for i in range(12)), "head"],
    "vgg16": [*(f"features.{i}" for i in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)), "classifier"],
    "densenet121": ["stem", *DENSE, "classifier"],
    "convnext_tiny": 23,
    "mobilenet_v3_small": ["stem", *(f"features.{i}" for i in range(1, 12)), "classifier"],
    "googlenet": ["stem", *INCEPTION, "classifier"],
    "swin_t": 17,
}


def build(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """The model with ten classes, and four images. Weights on the meta device cost nothing, and hold nothing. Layers
    that would take most of the time by their width alone are narrow: VGG's classifier, and ViT."""
    options: dict[str, Any] = {}
    if name == "googlenet":
        options["init_weights"] = False
    with pytest.MonkeyPatch.context() as patch, torch.device(device):
        for slow in ("kaiming_normal_", "normal_"):  # a second pass over VGG's 130 million weights
            patch.setattr(nn.init, slow, lambda t, *_, **__: t)
        torch.manual_seed(0)
        if name == "vit_b_16":
            model = torchvision.models.VisionTransformer(32, 16, 12, 12, hidden_dim=96, mlp_dim=384, num_classes=10)
        else:
            if name == "vgg16":
                patch.setattr(nn.Linear, "__init__", _narrow(nn.Linear.__init__))
            model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
        return model, torch.rand(4, 3, 32, 32)


def _narrow(make: Any) -> Any:
    """``make``, which makes a linear layer, with 64 channels in place of 4096."""
    return lambda layer, *sizes, **options: make(layer, *(64 if n == 4096 else n for n in sizes), **options)


def assert_no_skip_crosses(model: nn.Module, traced: TracedModel) -> None:
    """Recomputed on fx's own trace: between the modules of two sides of a cut there is exactly one tensor."""
    owner = {m: i for i, f in enumerate(traced.facts) for m in f.modules}
    graph = nx.DiGraph()
    place: dict[fx.Node, int] = {}
    for node in fx.symbolic_trace(model.eval()).graph.nodes:
        stack = node.meta.get("nn_module_stack", {"": None})
        inside = str(node.target) if node.op == "call_module" else next(reversed(stack))
        at = {i for m, i in owner.items() if inside and f"{m}.".startswith(f"{inside}.")}
        place[node] = at.pop() if len(at) == 1 else max((place[n] for n in node.all_input_nodes), default=0)
        graph.add_edges_from((n, node) for n in node.all_input_nodes)
    for cut in range(len(traced.components) - 1):
        crossing = {a for a, b in graph.edges if place[a] <= cut < place[b]}
        assert len(crossing) == 1, (traced.components[cut].name, crossing)


@pytest.mark.parametrize("name", some(EXPECTED, EXPECTED.keys() - {"vgg16", "convnext_tiny"}))
def test_components_compute_bitwise_what_the_model_computes(name: str) -> None:
    model, x = build(name)
    model.get_submodule(next(n for n, m in model.named_modules() if not [*m.children()])).eval()
    modes = [m.training for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    versions, values, random = [p._version for p in model.parameters()], buffers(model), torch.get_rng_state()
    traced = trace(model, x[:1], name=name)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert [p._version for p in model.parameters()] == versions
    assert all(torch.equal(b, v) for b, v in zip(model.buffers(), values, strict=True))
    assert all(p.grad is None for p in model.parameters())

    assert (traced.notes, traced.unused) == ((), ())
    names = [c.name for c in traced.components]
    assert EXPECTED[name] in (names, len(names))
    keys = [k for c in traced.components for k in c.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    own = dict(model.named_parameters())
    assert all(p is own[n] for c in traced.components for n, p in c.named_parameters())
    assert_bitwise(model, traced, x[:2])
    if name in ("resnet50", "densenet121", "mobilenet_v3_small", "googlenet"):
        assert_no_skip_crosses(model, traced)


def test_parameters_keep_their_order() -> None:
    model, x = build("resnet18", "meta")
    order = [n for n, _ in model.named_parameters()]
    for component in trace(model, x, name="resnet18").components:  # optimizers and buckets number them
        held = [n for n, _ in component.named_parameters()]
        assert held == [n for n in order if n in held]


def test_what_lies_between_blocks_is_named_by_its_path() -> None:
    model, x = build("convnext_tiny", "meta")
    names = [c.name for c in trace(model, x, name="convnext_tiny").components]
    assert [n for n in names if n.count(".") == 1] == ["features.2", "features.4", "features.6"]


def test_light_layers_go_where_the_least_crosses() -> None:
    model, x = build("vgg16", "meta")
    last, classifier = trace(model, x, name="vgg16").facts[-2:]
    # 32x32 input: pooling grows 512x1x1 to 512x7x7, so it belongs behind the cut.
    assert last.output_bytes_per_sample == 512 * 4
    assert classifier.modules[0] == "avgpool"
    model, _ = build("resnet18", "meta")
    last, classifier = trace(model, torch.empty(1, 3, 64, 64, device="meta"), name="resnet18").facts[-2:]
    assert last.output_bytes_per_sample == 512 * 4  # and here it shrinks 512x2x2
    assert classifier.modules == ("fc",)


def test_auxiliary_heads_stay_with_the_component_they_leave() -> None:
    model, x = build("googlenet")
    traced = trace(model, x, name="googlenet")
    for component in traced.components:
        component.train()
    sides = {c.name: c.side_outputs() for c in traced.components if c.side_outputs()}
    assert sides == {"inception4a": ("aux1.fc2",), "inception4d": ("aux2.fc2",)}
    component = next(c for c in traced.components if c.name == "inception4a")
    assert any(n.startswith("aux1.") for n, _ in component.named_parameters())
    assert type(traced.run(x)) is type(model.train()(x))
    assert component.eval().side_outputs() == ()
    assert len(component(torch.randn(2, 480, 4, 4))) == 1


def test_modes_share_a_graph_where_they_agree() -> None:
    model, x = build("resnet18", "meta")
    assert all(c.train_graph is c.eval_graph for c in trace(model, x, name="resnet18").components)
    model, x = build("googlenet", "meta")
    differing = [c.name for c in trace(model, x, name="g").components if c.train_graph is not c.eval_graph]
    assert differing == ["inception4a", "inception4d"]


def test_replacing_a_submodule_replaces_it_in_both_graphs() -> None:
    model, x = build("googlenet")
    component = next(c for c in trace(model, x, name="g").components if c.name == "inception4a")
    value = torch.randn(2, 480, 4, 4)
    component.get_submodule("inception4a.branch1").conv = nn.Conv2d(480, 192, 1, bias=False)
    component.get_submodule("inception4a.branch1").conv.weight.data.zero_()
    for training in (True, False):
        component.train(training)
        assert not component(value)[0][:, :192].any()
    assert model.inception4a.branch1.conv.weight.any()  # containers are the component's own


def test_a_copy_stands_on_its_own() -> None:
    model = torchvision.models.VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    x = torch.rand(2, 3, 8, 8)
    original = trace(model, x, name="vit").components[0].eval()
    clone = copy.deepcopy(original)
    assert torch.equal(clone(x)[0], original(x)[0])
    with torch.no_grad():
        clone.class_token.add_(1)
    assert not torch.equal(clone(x)[0], original(x)[0])
    assert [n for n, _ in clone.named_parameters()] == [n for n, _ in original.named_parameters()]
    mine = {p.data_ptr() for p in model.parameters()}
    assert not any(p.data_ptr() in mine for p in clone.parameters())


def test_a_component_with_cached_lookups_computes_the_same_with_replaced_parameters() -> None:
    model = torchvision.models.VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    x = torch.rand(2, 3, 8, 8)
    first = trace(model, x, name="vit").components[0].eval()
    wanted = first(x)[0]
    first.cache_lookups()
    assert torch.equal(first(x)[0], wanted)
    assert copy.deepcopy(first)(x)[0].equal(wanted)
    first.register_parameter("class_token", nn.Parameter(first.class_token + 1))  # as fully_shard puts others there
    first.conv_proj.register_parameter("weight", nn.Parameter(torch.zeros_like(first.conv_proj.weight)))
    after = first(x)[0]
    uncached = copy.deepcopy(first)
    assert uncached._runs is None
    assert torch.equal(after, uncached(x)[0])
    assert not torch.equal(after, wanted)


def test_a_component_with_cached_lookups_has_two_modes() -> None:
    model, x = build("googlenet")
    components = trace(model, x, name="g").components
    component = next(c for c in components if c.name == "inception4a")
    component.cache_lookups()
    value = torch.randn(2, 480, 4, 4)
    assert len(component.train()(value)) == 2
    assert len(component.eval()(value)) == 1


def test_fingerprint_tells_structures_apart_and_nothing_else() -> None:
    model, x = build("resnet18", "meta")
    first = trace(model, x, name="a").model_fingerprint
    assert trace(model.eval(), x[:1], name="b").model_fingerprint == first
    assert trace(*build("resnet18"), name="c").model_fingerprint == first
    model.layer1[0].conv1.stride = (2, 2)
    model.layer1[0].downsample = nn.Conv2d(64, 64, 1, 2)
    model.layer2[0].downsample[0].stride = model.layer2[0].conv1.stride = (1, 1)
    assert trace(model, x, name="a").model_fingerprint != first
