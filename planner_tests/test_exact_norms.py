"""BatchNorm over the samples of all ranks is that of one device, in one, two and three dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.launch import run_ranks
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.batchnorm import synchronise
from asa.sharding.layers.modules import shard_module
from asa.sharding.layers.propagate import Cut
from asa.tracing import trace

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def inputs(dimensions: int) -> Tensor:
    generator = torch.Generator().manual_seed(dimensions)
    return torch.randn(6, 3, *(2,) * dimensions, generator=generator, dtype=torch.float64)


def _on_rank(rank: int) -> list[tuple[Tensor, Tensor]]:
    axis = Axis(size=2, index=rank, group=dist.group.WORLD)
    found = []
    for dimensions, kind in enumerate(NORMS, start=1):
        net = trace(nn.Sequential(kind(3)).double(), inputs(dimensions)[:2], name="norm").components[0].train()
        synchronise(net, axis)
        normalised = net(inputs(dimensions)[rank * 3 : rank * 3 + 3])[0].detach()
        found.append((normalised, dict(net.named_buffers())[next(n for n, _ in net.named_buffers() if "var" in n)]))
    return found


def test_every_dimension_is_normalised_over_all_ranks() -> None:
    spread = run_ranks(2, _on_rank, threads=1, timeout_s=120)
    for number, kind in enumerate(NORMS):
        alone = kind(3).double()
        whole = alone(inputs(number + 1)).detach()
        assert torch.cat([spread[r][number][0] for r in (0, 1)]).numpy() == pytest.approx(whole.numpy(), abs=1e-12)
        for r in (0, 1):
            assert spread[r][number][1].numpy() == pytest.approx(alone.running_var.numpy(), rel=1e-12)


class Behind(nn.Module):
    """A norm that scales only or does not even scale, and an activation in place behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 4, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.before(x)).relu_()


def scaling_only() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4)
    norm.bias = None  # as with bias=False, which older versions of torch do not have
    nn.init.uniform_(norm.weight, 2.0, 3.0)
    return norm


def _gradients_on(rank: int) -> list[list[Tensor]]:
    axis = Axis(size=2, index=rank, group=dist.group.WORLD)
    found = []
    for norm in norms():
        net = trace(Behind(norm).double(), inputs(2)[:2], name="norm").components[0].train()
        synchronise(net, axis)
        net(inputs(2)[rank * 3 : rank * 3 + 3])[0].square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    return found


def norms() -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    return nn.BatchNorm2d(4, affine=False), scaling_only()


def test_norms_without_a_bias_scale_and_may_be_changed_in_place() -> None:
    spread = run_ranks(2, _gradients_on, threads=1, timeout_s=120)
    for number, norm in enumerate(norms()):
        alone = Behind(norm).double()
        alone(inputs(2)).square().sum().backward()
        for i, p in enumerate(alone.parameters()):
            assert sum(s[number][i] for s in spread).numpy() == pytest.approx(p.grad.numpy(), abs=1e-9)


def test_a_norm_without_a_bias_has_none_when_it_is_split() -> None:
    norm = shard_module(scaling_only(), "local", Cut(1, 4), Axis(size=2, index=1))
    assert sorted(n for n, _ in norm.named_parameters()) == ["weight"]
