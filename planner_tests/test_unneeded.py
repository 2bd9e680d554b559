"""A second forward leaves out the products whose values no gradient depends on, and changes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import nouns
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asa.ir.profile import Ceilings
from asa.profiler.measure import _with_spared
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.recompute import OF_SHARDS, recompute
from asa.sharding.layers.tensor import plan_split, sequence_plans, split
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.tracing import trace
from asa.tracing.build import TracedModel
from asa.tracing.facts import flop_counter
from asa.tracing.unneeded import unneeded

ROWS, WIDTH = 4, 6


class NotANumber(TorchDispatchMode):
    """Context in which new zeros are NaN instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_zeros.default:
            self.used = True
            result.fill_(torch.nan)
        return result

    used = False


class _Block(nn.Module):
    """A block of a language model, before whose residual stream every value is needed."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class _Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(self.first(x).relu()) * 0.5).flatten(1)


class _Function(nn.Module):
    """The linear layer of GPT-2 as Hugging Face writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return F.dropout(y.view((*x.size()[:-1], 8)), 0.5, self.training)


class _InTwoWays(nn.Module):
    """Its only product is used by an operator that saves it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + y + y.tanh()


class _InPlace(_InTwoWays):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        z = y.view(-1, WIDTH)
        y += self.linear(x)
        return z.exp()


def _adapted() -> nn.Module:
    """A layer with a low-rank update in place of its forward: two products are inputs of others."""
    block, left, right = _Block(), torch.randn(WIDTH, 2), torch.randn(2, 4 * WIDTH)
    usual = block.down.forward
    block.down.forward = lambda x: usual(x) + F.linear(F.linear(x, right * block.down.weight.mean()), left)  # type: ignore[method-assign]
    return block


def _frozen() -> nn.Module:
    block = _Block()
    block.down.requires_grad_(False)
    return block


TOKENS, IMAGES = (ROWS, 5, WIDTH), (ROWS, 3, 8, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(WIDTH, 3)), TOKENS, 1),
    "block": (_Block, TOKENS, 1),
    "dropout": (lambda: _Block(0.5), TOKENS, 1),
    "frozen": (_frozen, TOKENS, 1),
    "adapted": (_adapted, TOKENS, 0),
    "blocks": (lambda: nn.Sequential(_Block(), _Block(), nn.Linear(WIDTH, 9)), TOKENS, 3),
    "norm": (lambda: nn.Sequential(_Block(), nn.LayerNorm(WIDTH)), TOKENS, 0),
    "convolution": (_Convolutions, IMAGES, 1),
    "function": (_Function, TOKENS, 1),
    "used twice": (_InTwoWays, TOKENS, 0),
    "in place": (_InPlace, TOKENS, 0),
}


def _traced(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, TracedModel, Tensor]:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(shape)
    return model, trace(model, x, name="case"), x.requires_grad_()


def _gradients(
    make: Callable[[], nn.Module], shape: tuple[int, ...], *, again: bool, autocast: bool = False, hook: bool = False,
    use: Callable[[Tensor, Tensor], Tensor] = lambda y, _x: y.float().square().sum(),
) -> tuple[list[Tensor], int]:  # fmt: skip
    """The gradients of the input and of all parameters, and the FLOPs of everything."""
    model, traced, x = _traced(make, shape)
    context = SampleContext(samples=torch.arange(ROWS), total=ROWS)
    for component in traced.components if again else ():
        recompute(component, context)
    for layer in model.modules() if hook else ():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(lambda _m, _args, y: torch.testing.assert_close(y, y))
    torch.manual_seed(5)
    value: Any = x
    with flop_counter() as flops:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for component in traced.components:
                value = component(value)[0]
        use(value, x).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], flops.get_total_flops()


def _penalty(y: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.sum() + gradient.square().sum()


def _equal(once: list[Tensor], twice: list[Tensor]) -> None:
    assert len(once) == len(twice)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_whole_second_forward(case: str, autocast: bool) -> None:
    make, shape, expected = CASES[case]
    once, _ = _gradients(make, shape, again=False, autocast=autocast)
    mode = NotANumber()
    with mode if expected else nullcontext():  # autograd's own zeros are none of this
        twice, _ = _gradients(make, shape, again=True, autocast=autocast)
    assert mode.used == (expected > 0)
    _equal(once, twice)


@pytest.mark.parametrize("case", CASES)
def test_only_what_nobody_needs_is_left_out(case: str) -> None:
    make, shape, expected = CASES[case]
    _, traced, _ = _traced(make, shape)
    assert sum(len(unneeded(c.train_graph)) for c in traced.components) == expected
    (_, plain), (_, shortened) = (_gradients(make, shape, again=again) for again in (False, True))
    spared = sum(c.spared_flops_per_sample for c in traced.facts)
    assert shortened - plain == ROWS * (sum(c.flops_per_sample for c in traced.facts) - spared)
    assert (spared > 0) == (expected > 0)


@pytest.mark.parametrize("tokens", [False, True], ids=["tensor", "sequence"])
def test_shards_leave_out_their_parts(tokens: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(_Feedforward() for _ in range(3)), nn.Linear(WIDTH, 8))
    traced = trace(model, torch.zeros(TOKENS), name="shards")
    found = 0
    for component in traced.components:
        plans = (sequence_plans if tokens else plan_split)(component)
        if plans and plans[0].actions:
            found += len(unneeded(component.train_graph))
            split(component, Axis(size=2, index=0), tokens=tokens)
            assert len(unneeded(component.train_graph, *OF_SHARDS)) == 1, component.name
    assert found >= 3


@pytest.mark.parametrize("case", ["function", "convolution"])
def test_gradients_can_be_differentiated_again(case: str) -> None:
    make, shape, _ = CASES[case]
    once, _ = _gradients(make, shape, again=False, use=_penalty)
    with NotANumber():
        twice, _ = _gradients(make, shape, again=True, use=_penalty)
    _equal(once, twice)


def test_hooks_see_values_in_both_forwards() -> None:
    _, traced, _ = _traced(_Block, TOKENS)
    with NotANumber():
        _, flops = _gradients(_Block, TOKENS, again=True, hook=True)
    assert flops == _gradients(_Block, TOKENS, again=False)[1] + ROWS * sum(c.flops_per_sample for c in traced.facts)


NUMBER = torch.tensor(2.0)
PASSING: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + NUMBER, "sub": lambda x: 1 - x, "neg": lambda x: -x, "item": lambda x: x[:, 1],
    "cat": lambda x: torch.cat([x, x]), "stack": lambda x: torch.stack([x, x]), "flatten": torch.flatten,
    "transpose": lambda x: x.transpose(0, 1), "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x.expand(2, 4, 6), "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "dropout": lambda x: F.dropout(x, 0.5), "to": lambda x: x.double(), "contiguous": lambda x: x.t().contiguous(),
    "mul": lambda x: x * 3, "div": lambda x: x / 3,
    "alike": lambda x: SampleDropout(0.5, site="a", context=SampleContext(samples=torch.arange(4), total=4))(x),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_operators_that_are_passed_save_nothing_of_their_input(name: str) -> None:
    saved: list[Tensor] = []
    x = (torch.arange(24.0).view(4, 6) + 100).requires_grad_() + 0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        PASSING[name](x)
    assert all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in saved)


def test_a_profile_takes_the_least_time_of_what_is_left_out() -> None:
    profile = nouns.profile()
    parts = tuple(replace(c, spared_flops_per_sample=c.flops_per_sample / 2) for c in profile.graph.components)
    graph = replace(profile.graph, components=parts)
    assert _with_spared(profile.timings, graph, None) == profile.timings
    slowly = _with_spared(profile.timings, graph, Ceilings(flops_per_s=1.0, bytes_per_s=1.0))
    assert all(t.spared_s == t.forward.median for t in slowly)
    for t in _with_spared(profile.timings, graph, Ceilings(flops_per_s=1e15, bytes_per_s=1.0)):
        assert t.spared_s == t.microbatch * graph.component(t.component).spared_flops(t.tensor_degree) / 1e15
