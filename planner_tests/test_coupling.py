"""Models whose outputs or gradients see other samples are told from those whose do not, in every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.api.calls import Call
from asa.api.model.coupling import KEEPS, coupled
from benchmarks.program_table.strange import ByNorm


class Clamped(ByNorm):
    """As it is; its gradient is clamped."""

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


class Net(nn.Module):
    def __init__(self, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.behind, self.calls = nn.Linear(4, 3), behind, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.behind(self.layer(x))


SEES = {
    "mean": lambda h: h - h.mean(0), "softmax": lambda h: h.softmax(0), "norm": ByNorm.apply, "clamped": Clamped.apply,
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True), "attention": lambda h: (h @ h.T).softmax(1) @ h,
}  # fmt: skip
SEES_NOT = {
    "tanh": torch.tanh, "softmax": lambda h: h.softmax(1), "place": lambda h: h[torch.arange(len(h))],
    "layer_norm": lambda h: F.layer_norm(h, (3,)), "counted rows": lambda h: h * len(h) / h.shape[0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_sees_other_samples_is_found(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = Call((torch.randn(2, 4).to(dtype),))
    for name, behind in SEES.items():
        if dtype is torch.bfloat16 and name == "norm":
            continue  # of gradients in so few digits nothing can be told
        assert coupled(Net(behind).to(dtype), call) > 1e-2, name
    for name, behind in SEES_NOT.items():
        assert coupled(Net(behind).to(dtype), call) == 0, name


def test_a_model_that_moves_from_call_to_call_is_no_coupling_and_is_left_as_it_was() -> None:
    net = Net(torch.tanh)
    net.behind = lambda h: h * net.calls
    assert coupled(net, Call((torch.randn(2, 4),))) == KEEPS
    assert net.calls == 0
    assert all(p.grad is None for p in net.parameters())
