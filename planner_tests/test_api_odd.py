"""What models and loops do that a plan could lose in silence: hooks, changes in place, loss scales, second derivatives,
two models in one loop, copies, compiled modules. Either it is as on one device, or it is refused in a line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.api.plans.planning import outputs_of
from asa.errors import AsaError, InvalidInputError, UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.sharding.split import held_of
from asa.tracing import trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import Choose, hand_plan, uniform

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]

PLANS: dict[str, tuple[Choose, str]] = {
    "ddp": (uniform(2, 1), "replicate"),
    "zero1": (uniform(2, 1), "zero1"),
    "zero2": (uniform(2, 1), "zero2"),
    "zero3": (uniform(2, 1), "zero3"),
    "tensor": (uniform(1, 2), "replicate"),
    "alone": (uniform(1, 1), "replicate"),
}


class Small(nn.Module):
    """Three linear layers; ``between`` is what happens to the second's output in front of the norm."""

    def __init__(self, between: Callable[[Tensor], object] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(192, 14), nn.Linear(14, 22), nn.Linear(22, user.CLASSES)
        self.norm, self.between = nn.LayerNorm(22), between

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, batch first."""
        x = F.gelu(self.first(x.flatten(1))) * 1
        self.between(x)
        x = self.second(x)
        self.between(x)
        return self.last(F.gelu(self.norm(x)))


def in_place(x: Tensor) -> None:
    """Half of it doubled through a view, all of it moved."""
    x[:, :7].mul_(2)
    x.add_(0.5)


def small(between: Callable[[Tensor], object] = lambda x: x) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Small(between).double()


def plan_for(name: str, make: Callable[[], nn.Module] = small, classes: int = user.CLASSES) -> Plan:
    choose, strategy = PLANS[name]
    found = hand_plan(
        make().float(), 2, choose, input_shape=user.SHAPE, num_classes=classes, data_strategy=lambda _i: strategy,
        global_batch=user.BATCH,
    )  # fmt: skip
    example = torch.zeros((2, *user.SHAPE), dtype=torch.float64)
    return replace(found, model_fingerprint=trace(make(), example, name="model").model_fingerprint)


def plain_step(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    F.cross_entropy(net(x).div_(0.7), y).backward()
    opt.step()


class Scaled:
    """With a loss scale and clipping; in the second step a gradient of the last rank overflows."""

    def __init__(self) -> None:
        self.scaler, self.steps = torch.amp.GradScaler("cpu", init_scale=1024.0), 0

    def __call__(self, net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        """A step of a program."""
        opt.zero_grad()
        loss = self.scaler.scale(F.cross_entropy(net(x), y))
        loss.backward()
        self.steps += 1
        if self.steps == 2 and (not dist.is_initialized() or dist.get_rank() == 1):
            last = held_of(dict(net.named_parameters())["last.bias"].grad)
            getattr(last, "_local_tensor", last).view(-1)[:1] = math.inf
        self.scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        self.scaler.step(opt)
        self.scaler.update()


CASES: dict[tuple[str, str], tuple[Callable[[], nn.Module], Callable[[], Step]]] = {
    ("in place", "zero3"): (partial(small, in_place), lambda: plain_step),
    ("in place", "tensor"): (partial(small, in_place), lambda: plain_step),
    ("scaled", "zero1"): (small, Scaled),
    ("scaled", "zero2"): (small, Scaled),
    ("scaled", "tensor"): (small, Scaled),
}
"""By what is tried and under which plan. (Where every rank has all gradients, none can overflow on one alone.)"""


def trained(make: Callable[[], nn.Module], step: Step, plan: Plan | None = None) -> dict[str, Tensor]:
    net: Any = make()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batches: Any = user.loader()
    if plan is not None:
        net, opt, batches = asa.parallelize(net, opt, batches, plan=plan)
    for _ in range(2):
        for x, y, _number in batches:
            step(net, opt, x, y)
    found: dict[str, Tensor] = net.state_dict()
    return found


def on_rank(rank: int, plans: dict[tuple[str, str], Plan]) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {case: trained(CASES[case][0], CASES[case][1](), plan) for case, plan in plans.items()}


def test_changes_in_place_and_loss_scales_are_those_of_one_device() -> None:
    plans = {(what, name): plan_for(name, make) for (what, name), (make, _step) in CASES.items()}
    expected = {what: trained(make, step()) for (what, _name), (make, step) in CASES.items()}
    for (what, name), state in run_ranks(2, on_rank, plans, threads=1, timeout_s=120)[1].items():
        assert user.distance(state, expected[what]) < 1e-9, (what, name)


def generator() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        body = nn.Sequential(nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 192))
        return nn.Sequential(nn.Flatten(1), body, nn.Unflatten(1, user.SHAPE)).double()


def critic() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        body = nn.Sequential(nn.Linear(192, 20), nn.GELU(), nn.Linear(20, 8))
        return nn.Sequential(nn.Flatten(1), body, nn.LayerNorm(8), nn.Linear(8, 1)).double()


def adversaries(plans: tuple[Plan, Plan] | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two models and two optimizers in one loop, one through the other; the last batch of an epoch is uneven."""
    made: Any = generator()
    judge: Any = critic()
    opts: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, judge)]
    batches: Any = user.loader()
    if plans is not None:
        made, opts[0], batches = asa.parallelize(made, opts[0], batches, plan=plans[0])
        judge, opts[1], _ = asa.parallelize(judge, opts[1], user.loader(), plan=plans[1])
    for _ in range(2):
        for x, _y, _number in batches:
            fake = made(x)
            opts[1].zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            opts[1].step()
            opts[0].zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            opts[0].step()
    return made.state_dict(), judge.state_dict()


def adversaries_on_rank(rank: int, plans: list[tuple[Plan, Plan]]) -> list[Any]:
    return [adversaries(pair) for pair in plans]


def test_two_models_in_one_loop() -> None:
    expected = adversaries()
    names = ("ddp", "tensor")
    plans = [(plan_for(name, generator), plan_for(name, critic)) for name in names]
    for name, found in zip(names, run_ranks(2, adversaries_on_rank, plans, threads=1, timeout_s=120)[0], strict=True):
        for state, reference in zip(found, expected, strict=True):
            assert user.distance(state, reference) < 1e-9, name


def twice(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """A penalty on the gradient of the outputs by the inputs."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def asked_for(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Gradients that no rank adds up."""
    torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))


def hook_late(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    next(net.parameters()).register_hook(lambda gradient: gradient * 2)


def hook_early() -> nn.Module:
    net = small()
    net.get_parameter("second.weight").register_hook(lambda gradient: gradient * 2)
    return net


def hook_accumulated() -> nn.Module:
    net = small()
    net.get_parameter("second.weight").register_post_accumulate_grad_hook(lambda p: None)
    return net


REFUSED: dict[str, tuple[str, Callable[[], nn.Module], Step, str]] = {
    "second derivative, tensor": ("tensor", small, twice, "a gradient of a gradient"),
    "second derivative, computed by one rank": ("alone", small, twice, "a gradient of a gradient"),
    "second derivative, zero3": ("zero3", small, twice, "a gradient of a gradient"),
    "own gradients": ("ddp", small, asked_for, "torch.autograd.grad and torch.func give a rank"),
    "own gradients, zero2": ("zero2", small, asked_for, "torch.autograd.grad and torch.func give a rank"),
    "own gradients, zero3": ("zero3", small, asked_for, "torch.autograd.grad and torch.func give a rank"),
    "hook, tensor": ("tensor", hook_early, plain_step, "second.weight has a hook on its gradient"),
    "hook, zero3": ("zero3", hook_early, plain_step, "second.weight has a hook on its gradient"),
    "hook, afterwards": ("zero3", small, hook_late, "would never run"),
    "accumulated": ("ddp", hook_accumulated, plain_step, "second.weight has a hook that runs when"),
}


def refused_on_rank(rank: int, plans: dict[str, Plan]) -> dict[str, str]:
    found = {}
    for case, (_plan, make, step, _words) in REFUSED.items():
        try:
            trained(make, step, plans[case])
            found[case] = "nothing"
        except AsaError as error:
            found[case] = f"{type(error).__name__}: {error}"
    return found


def test_what_ranks_would_get_wrong_in_silence_is_refused() -> None:
    plans = {case: plan_for(name, make) for case, (name, make, _step, _words) in REFUSED.items()}
    for found in run_ranks(2, refused_on_rank, plans, threads=1, timeout_s=120):
        for case, (_plan, _make, _step, words) in REFUSED.items():
            assert found[case].startswith(UsageError.__name__), (case, found[case])
            assert words in found[case], case


def test_a_hook_on_the_model_itself_is_not_lost() -> None:
    net = small()
    net.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 1.5,))
    found = trace(net, torch.zeros((2, *user.SHAPE), dtype=torch.float64), name="model")  # which hides the factor
    assert found.notes == ("the model is one component: the model itself has hooks",)


def test_a_sparse_buffer_is_named() -> None:
    net = small()
    net.register_buffer("links", torch.eye(3).to_sparse())
    with pytest.raises(InvalidInputError, match="links of the model is sparse; hand in a dense tensor"):
        trace(net, torch.zeros((2, *user.SHAPE), dtype=torch.float64), name="model")


class Descends(nn.Module):
    """Adds a gradient by its input, which forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.body(x)
            (slope,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        return y + self.body(slope)


def test_a_forward_that_computes_gradients_is_measured() -> None:
    found = trace(Descends(), torch.ones(2, 4), name="model")
    assert sum(c.saved_bytes_per_sample for c in found.facts) > 0


@pytest.mark.parametrize(("part", "words"), [("", "the model is TorchScript"), ("second", "second is TorchScript")])
def test_torchscript_is_named(part: str, words: str) -> None:
    net = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net.get_submodule(part) if part else nn.Sequential(nn.Flatten(1), net.first))
    if part:
        net.set_submodule(part, scripted)
    for ask in (partial(trace, name="model"), outputs_of):
        with pytest.raises(InvalidInputError, match=words):
            ask(net if part else scripted, torch.zeros((2, *user.SHAPE), dtype=torch.float64))
