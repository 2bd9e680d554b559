"""Dropout of attention is a function of the sample, also inside torch's own layers and between two inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.attention import with_masks_by_sample
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.tracing import trace

FLOATS = torch.full((5, 5), float("-inf")).triu(1)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"need_weights": False}, {"average_attn_weights": False}, {"attn_mask": FLOATS, "is_causal": True},
        {"attn_mask": FLOATS.isinf(), "key_padding_mask": PADDED}, {"attn_mask": FLOATS.expand(6, 5, 5)},
    ],
    ids=["weights", "output", "heads", "causal", "padded", "mask-a-head"],
)  # fmt: skip
def test_it_computes_what_the_stock_module_does(batch_first: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
    x, y = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    options = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    expected, weights = stock(x, y, y, **options)
    assert with_masks_by_sample(stock, SampleDropout(0.0, site="here", context=SampleContext()))
    found, mine = stock(x, y, y, **options)
    assert torch.allclose(found, expected, atol=1e-12)
    assert (mine is None) == (weights is None)
    assert weights is None or torch.allclose(mine, weights, atol=1e-12)


class Translated(nn.Module):
    """An encoder and a decoder of torch's, dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 5)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.first(x.flatten(2).transpose(1, 2))
        return self.last(self.decoder(h, self.encoder(h)).mean(1))


def test_masks_inside_torchs_layers_belong_to_samples() -> None:
    traced = trace(Translated(), torch.zeros(2, 3, 4, 4), name="translated")
    context = SampleContext(seed=1)
    make_reproducible(traced.components, context)
    for component in traced.components:
        component.train()
    x = torch.randn(6, 3, 4, 4)

    def of(rows: Tensor) -> Tensor:
        context.samples, context.total = rows, 6
        found = traced.run(x[rows])
        assert isinstance(found, Tensor)
        return found

    whole = of(torch.arange(6))
    order = torch.tensor([4, 1, 5])
    assert torch.allclose(of(order), whole[order], atol=1e-5)
    context.step = 1
    assert not torch.allclose(of(torch.arange(6)), whole, atol=1e-2)
