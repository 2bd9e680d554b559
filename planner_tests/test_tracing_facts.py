"""The figures of a traced model, against figures worked out by hand or counted another way."""

from __future__ import annotations

import math

import pytest
import torch
import torchvision
from torch import Tensor, nn

from asa.ir.graph import Component
from asa.tracing import TracedModel, trace


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(6 * 2 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn(self.conv1(x))))
        return self.fc(torch.sigmoid(self.conv2(x)).flatten(1))


def test_a_small_network_by_hand() -> None:
    traced = trace(SmallNet(), torch.randn(1, 3, 8, 8), name="small")
    first, second, last = traced.facts
    assert traced.input_bytes_per_sample == 3 * 8 * 8 * 4
    assert (first.name, second.name, last.name) == ("conv1", "conv2", "fc")
    assert (first.kind, second.kind, last.kind) == ("convolution", "convolution", "linear")
    assert first.modules == ("conv1", "bn", "relu", "pool")

    assert first.flops_per_sample == 2 * (3 * 3 * 3) * 4 * 8 * 8
    assert second.flops_per_sample == 2 * (4 * 3 * 3) * 6 * 2 * 2
    assert last.flops_per_sample == 2 * 24 * 5

    assert (first.num_parameter_tensors, first.parameter_bytes) == (3, 4 * (4 * 3 * 9 + 4 + 4))
    assert first.buffer_bytes == 4 * (4 + 4) + 8  # running mean and variance; the count of batches is an int64
    assert (second.num_parameter_tensors, second.parameter_bytes) == (2, 4 * (6 * 4 * 9 + 6))
    assert (first.batch_norm, second.batch_norm) == (True, False)

    assert first.output_bytes_per_sample == 4 * 4 * 4 * 4
    assert last.output_bytes_per_sample == 5 * 4
    plane = 4 * 8 * 8 * 4
    # BatchNorm's input; the ReLU's output, which is also the pooling's input; the pooling's indices (int64); and
    # the output, which the second convolution keeps. The image itself belongs to nobody.
    assert first.saved_bytes_per_sample == plane + plane + 4 * 4 * 4 * 8 + 4 * 4 * 4 * 4
    assert second.saved_bytes_per_sample == 6 * 2 * 2 * 4  # the sigmoid's output, flattened in place for the linear
    assert last.saved_bytes_per_sample == 0


def hooked_flops(model: nn.Module, x: Tensor) -> int:
    """Forward FLOPs of convolutions and linear layers per sample, from the shapes hooks see."""
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        positions = math.prod(output.shape[2:]) if output.dim() == 4 else 1
        total += 2 * weight.numel() * positions * output.shape[0]

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    model(x)
    for handle in handles:
        handle.remove()
    return total // x.shape[0]


def traced_on_meta(name: str, size: int) -> tuple[nn.Module, TracedModel]:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
        return model, trace(model, torch.empty(1, 3, size, size), name=name)


def test_published_figures_of_resnet50_without_running_it() -> None:
    _, traced = traced_on_meta("resnet50", 224)
    assert sum(f.flops_per_sample for f in traced.facts) == 2 * 4_089_184_256
    assert sum(f.parameter_bytes for f in traced.facts) == 4 * 25_557_032
    assert sum(f.num_parameter_tensors for f in traced.facts) == 161


@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_flops_and_parameters_add_up_to_the_models(name: str) -> None:
    model, traced = traced_on_meta(name, 64)
    assert sum(f.flops_per_sample for f in traced.facts) == hooked_flops(
        model, torch.empty(2, 3, 64, 64, device="meta")
    )
    assert sum(f.parameter_bytes for f in traced.facts) == sum(4 * p.numel() for p in model.parameters())
    assert sum(f.buffer_bytes for f in traced.facts) == sum(b.nbytes for b in model.buffers())


def test_saved_bytes_add_up_to_what_the_whole_model_keeps() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    x = torch.randn(6, 3, 32, 32)
    traced = trace(model, x, name="resnet18")
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model.train()(x)
    for tensor in (*model.parameters(), *model.buffers(), x):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    constant = sum(2 * 4 * m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert output.requires_grad
    assert sum(kept.values()) == 6 * sum(f.saved_bytes_per_sample for f in traced.facts) + constant


def test_attention_and_recurrence_are_counted() -> None:
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Linear(16, 4)
    )
    traced = trace(model, torch.randn(1, 5, 8), name="encoder")
    first = traced.facts[1]
    assert [f.kind for f in traced.facts] == ["linear", "attention", "attention", "linear"]
    assert [f.name for f in traced.facts] == ["embedding", "1.layers.0", "1.layers.1", "head"]
    assert first.flops_per_sample == 2 * 5 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 5 * 5 * 16
    assert [f.attention_flops_per_sample for f in traced.facts] == [0, 2 * 2 * 5 * 5 * 16, 2 * 2 * 5 * 5 * 16, 0]

    class Recurrent(nn.Module):
        def __init__(self, cell: type[nn.RNNBase]) -> None:
            super().__init__()
            self.cell = cell(8, 16, 2, batch_first=True)
            self.fc = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.cell(x)[0][:, -1])

    for cell, gates in ((nn.LSTM, 4), (nn.GRU, 3)):
        facts = trace(Recurrent(cell), torch.randn(2, 5, 8), name="recurrent").facts
        assert [f.kind for f in facts] == ["recurrent", "linear"]
        assert facts[0].flops_per_sample == 2 * 5 * gates * 16 * ((8 + 16) + (16 + 16))


def test_facts_are_components_whose_split_is_not_known_yet() -> None:
    facts = trace(SmallNet(), torch.randn(2, 3, 8, 8), name="small").facts
    assert all(isinstance(f, Component) for f in facts)
    assert [(f.name, f.split) for f in facts] == [("conv1", None), ("conv2", None), ("fc", None)]
