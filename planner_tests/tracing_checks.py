"""What every test of a traced model asks: is it exact, and what are its components called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asa.tracing import TracedModel, trace


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def buffers(model: nn.Module) -> list[Tensor]:
    return [b.clone() for b in model.buffers()]


def restore(model: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def step(model: nn.Module, run: Any, x: Tensor) -> tuple[Any, list[Tensor | None], list[Tensor]]:
    """Output, gradients (parameters, then input) and buffers of one forward and backward."""
    model.zero_grad()
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    output = run(x)
    torch.stack([t.square().sum() for t in tensors(output)]).sum().backward()
    return output, [p.grad for p in (*model.parameters(), x)], buffers(model)


def assert_bitwise(model: nn.Module, traced: TracedModel, x: Tensor) -> None:
    start = buffers(model)
    for training in (True, False):
        model.train(training)
        expected = step(model, model, x)
        restore(model, start)
        model.train(not training)  # components must not lean on the mode of the model
        for component in traced.components:
            component.train(training)
        found = step(model, traced.run, x)
        restore(model, start)
        assert type(found[0]) is type(expected[0])
        for ours, theirs in zip(found, expected, strict=True):
            pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True)
            assert all(a is b or torch.equal(a, b) for a, b in pairs), training


class Net(nn.Module):
    """Three linear layers, ``a`` to ``c``; subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)


def names(model: nn.Module, x: Tensor, note: str = "") -> list[str]:
    """Component names, after checking that the trace is exact; ``note`` must be in its notes, or there are none."""
    torch.manual_seed(0)
    traced = trace(model, x[:1], name="model")
    assert (note in traced.note) if note else not traced.note, traced.note
    if x.is_floating_point():
        assert_bitwise(model, traced, x)
    assert sorted(k for c in traced.components for k in c.state_dict()) == sorted(model.state_dict())
    return [c.name for c in traced.components]


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
