"""BatchNorm over the samples of all ranks is that of one device, in one, two and three dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.launch import run_ranks
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.batchnorm import synchronise
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
