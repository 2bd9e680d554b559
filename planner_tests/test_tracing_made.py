"""Modules that ``forward`` makes are what they call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asa.tracing import trace


@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_forward_makes_is_what_it_calls(training: bool) -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(nn.Dropout(0.5)(nn.ReLU()(self.first(x))))  # type: ignore[no-any-return]

    model = Making().train(training)
    found = trace(model, torch.randn(2, 4), name="making")
    assert [c.name for c in found.components] != ["model"]
    assert not any("one call" in note or "one component" in note for note in found.notes)
    for component in found.components:
        component.train(training)
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(found.run(x), expected)
