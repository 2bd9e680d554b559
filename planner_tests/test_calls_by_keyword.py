"""Layers and functions that get their arguments by keyword split as they do with arguments by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.tensor import detached_copy, plan_split, split
from asa.tracing import trace


class Named(nn.Linear):
    """A linear layer with a name of its own."""


class ByKeyword(nn.Module):
    def __init__(self, *, keywords: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.third, self.last = Named(256, 12), nn.Linear(12, 5)
        self.keywords = keywords

    def call(self, layer: nn.Module, x: Tensor) -> Any:
        return layer(input=x) if self.keywords else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.call(self.first, x)
        x = self.call(self.second, F.relu(x)).flatten(1)
        return self.call(self.last, F.relu(self.call(self.third, x)))


class Attends(nn.Module):
    def __init__(self, *, keywords: bool) -> None:
        super().__init__()
        self.attention, self.keywords = nn.MultiheadAttention(8, 4, batch_first=True), keywords

    def forward(self, x: Tensor) -> Tensor:
        if self.keywords:
            return self.attention(query=x, key=x, value=x, need_weights=False)[0]
        return self.attention(x, x, x, need_weights=False)[0]


def test_layers_split_alike_however_they_are_called() -> None:
    for kind, x in ((ByKeyword, torch.zeros(2, 3, 8, 8)), (Attends, torch.zeros(2, 5, 8))):
        by_keyword, by_position = (trace(kind(keywords=k), x, name="m").components for k in (True, False))
        actions = [[plan_split(c)[0].actions for c in chain] for chain in (by_keyword, by_position)]
        assert actions[0] == actions[1]
        assert any(actions[0])


class Functions(nn.Module):
    """One component in which values with split channels meet whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.third = (nn.Conv2d(3, 8, 1) for _ in range(3))
        self.scale, self.last = nn.Parameter(torch.ones(1, 8, 1, 1)), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.add(self.first(x), other=self.other(x), alpha=2)
        scaled = torch.mul(both, other=self.scale)
        planes = self.third(x).flatten(end_dim=1).mean(-1).reshape(x.shape[0], 8, -1, 1)
        return self.last(scaled + planes)


def test_a_whole_argument_by_keyword_is_not_taken_for_a_part() -> None:
    component = trace(Functions(), torch.zeros(2, 3, 4, 4), name="m").components[0]
    halved = detached_copy(component, "meta")
    split(halved, Axis(size=2, index=0))
    assert halved(torch.empty(2, 3, 4, 4, device="meta"))[0].shape == (2, 8, 4, 4)
