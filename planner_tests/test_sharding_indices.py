"""Pooling that gives back indices, as in SegNet: what comes out is no tensor that a rank could hold a part of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.profiler.measure import profile_module


class Unpooled(nn.Module):
    """Pooled, and put back where it was."""

    def __init__(self, *, by_function: bool) -> None:
        super().__init__()
        self.by_function = by_function
        self.front, self.norm, self.back = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.front(x)))
        pooled, where = F.max_pool2d(x, 2, return_indices=True) if self.by_function else self.pool(x)
        return self.back(self.unpool(pooled, where, output_size=x.size()))


@pytest.mark.parametrize("by_function", [False, True])
def test_a_model_that_pools_with_indices_is_profiled(by_function: bool) -> None:
    made = profile_module(
        Unpooled(by_function=by_function), torch.zeros(2, 3, 16, 16), spec="segnet", num_classes=4, global_batch=2,
        device=torch.device("cpu"), time_limit_s=20.0, max_tensor_degree=2,
    )  # fmt: skip
    assert len(made.graph) >= 1
    assert all(c.split is None or c.split.max_degree >= 1 for c in made.graph.components)
