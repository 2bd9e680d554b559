"""Norms of parameters and of gradients, as programs take them by hand: those of one device, whatever ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asa
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.tracing import trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import alternating, hand_plan, uniform

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]
MOST = 0.3

PLANS = {
    "tensor": (uniform(1, 2), "replicate"),
    "mixed": (alternating(2), "replicate"),
    "zero1": (uniform(2, 1), "zero1"),
    "zero3": (uniform(2, 1), "zero3"),
    "zero1 and tensor": (alternating(2, shift=1), "zero1"),
}


def attentive() -> nn.Module:
    """Convolutions, linear layers by rows and columns, a norm of either kind, and attention (one weight of three)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)),
            nn.Flatten(2), nn.TransformerEncoderLayer(64, 3 + 1, 30, 0.0, batch_first=True, norm_first=True),
            nn.Flatten(1), nn.Linear(384, user.CLASSES),
        ).double()  # fmt: skip


def plan_of(name: str, make: Callable[[], nn.Module] = user.model, width: int = 2) -> Plan:
    choose, strategy = PLANS[name]
    found = hand_plan(
        make().float(), width, choose, input_shape=user.SHAPE, num_classes=user.CLASSES,
        data_strategy=lambda _i: strategy, global_batch=user.BATCH,
    )  # fmt: skip
    traced = trace(make(), torch.zeros((2, *user.SHAPE), dtype=torch.float64), name="model")
    return replace(found, model_fingerprint=traced.model_fingerprint)


def gradients(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]


def penalty(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(net(x), y)
    for p in net.parameters():
        loss = loss + 0.01 * p.norm() + 0.02 * (p.square().sum() + 0.01).sqrt() + 0.002 * torch.linalg.vector_norm(p, 1)
        loss = loss + 0.03 * p.abs().max() + 0.01 * p.norm(p=3) + 0.02 * (p - 0.1).mean() ** 2 + 0.03 * p.var()
        if p.dim() == 2:  # along what is cut, and along what is not
            loss = loss + 0.01 * p.norm(dim=1).sum() + 0.01 * p.t().norm(dim=1, keepdim=True).amax()
        loss = loss + 0.01 * p.reshape(len(p), -1).norm(dim=1).max()
    loss.backward()


def by_items(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(net(x), y).backward()
    total = sum(p.grad.data.norm(2).item() ** 2 for p in net.parameters() if p.grad is not None) ** 0.5
    for p in net.parameters():
        p.grad.data.mul_(min(1.0, MOST / total))  # type: ignore[union-attr]


def by_stack(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(net(x), y).backward()
    total = torch.norm(torch.stack([torch.norm(g.detach()) for g in gradients(opt)]))
    assert all(bool(torch.isfinite(g).all()) for g in gradients(opt))
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad *= (MOST / (total + 1e-6)).clamp(max=1)


def by_foreach(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(net(x), y).backward()
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients(opt))))
    torch._foreach_mul_(gradients(opt), (MOST / total).clamp(max=1.0))


def by_torch(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Of each group by itself, and then by value."""
    F.cross_entropy(net(x), y).backward()
    for group in opt.param_groups:
        nn.utils.clip_grad_norm_(group["params"], MOST / 2)
    nn.utils.clip_grads_with_norm_(net.parameters(), MOST / 3, nn.utils.get_total_norm(gradients(opt), 1.0))
    nn.utils.clip_grad_value_(net.parameters(), 0.002)


def by_layer(net: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Adaptive clipping (Brock et al. 2021): the norms of rows of gradients by those of weights."""
    F.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        dims = tuple(range(1, p.dim())) if p.dim() > 1 else None
        weight, gradient = (t.detach().norm(2, dim=dims, keepdim=dims is not None) for t in (p, p.grad))
        most = weight.clamp(min=1e-3).mul(0.02)
        clipped = p.grad * (most / gradient.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(gradient < most, p.grad, clipped))


STEPS: dict[str, Step] = {
    "penalty": penalty, "items": by_items, "stack": by_stack, "foreach": by_foreach, "torch": by_torch,
    "layer": by_layer,
}  # fmt: skip


def trained(
    make: Callable[[], nn.Module], name: str, plan: Plan | None = None, steps: tuple[str, ...] = tuple(STEPS)
) -> dict[str, dict[str, Tensor]]:
    """The weights after every step, each of its own kind."""
    net: Any = make()
    opt: Any = user.optimizer(net, name)
    batches: Any = user.loader(samples=8 * len(steps) - 5)
    if plan is not None:
        net, opt, batches = asa.parallelize(net, opt, batches, plan=plan, batch_norm="exact")
    found: dict[str, dict[str, Tensor]] = {}
    for what, (x, y, _number) in zip(steps, batches, strict=True):
        opt.zero_grad()
        STEPS[what](net, opt, x, y)
        opt.step()
        found[what] = {key: value.clone() for key, value in net.state_dict().items() if value.is_floating_point()}
    if plan is not None:
        net.close()
    return found


MODELS = {"convolutions": (user.model, "sgd"), "attention": (attentive, "adamw")}
TRIED = [("attention", "tensor"), *(("convolutions", name) for name in ("mixed", "zero1", "zero1 and tensor"))]


def on_rank(_rank: int, plans: dict[tuple[str, str], Plan]) -> dict[tuple[str, str], dict[str, dict[str, Tensor]]]:
    return {key: trained(*MODELS[key[0]], plan) for key, plan in plans.items()}


def test_norms_by_hand_are_those_of_one_device() -> None:
    expected = {model: trained(*made) for model, made in MODELS.items()}
    plans = {(model, name): plan_of(name, MODELS[model][0]) for model, name in TRIED}
    for found in run_ranks(2, on_rank, plans, threads=1, timeout_s=120):
        for (model, name), states in found.items():
            for what, state in states.items():
                assert user.distance(state, expected[model][what]) < 1e-9, (model, name, what)


SHARDED = ("items", "stack", "foreach", "torch", "layer")
"""Penalties are to be made of ``.full_tensor()`` there."""


def sharded_on(_rank: int, plan: Plan) -> dict[str, dict[str, Tensor]]:
    return trained(*MODELS["convolutions"], plan, SHARDED)


def test_numbers_from_sharded_gradients_are_of_the_whole() -> None:
    expected = trained(*MODELS["convolutions"], None, SHARDED)
    for found in run_ranks(2, sharded_on, plan_of("zero3"), threads=1, timeout_s=120):
        for what, state in found.items():
            assert user.distance(state, expected[what]) < 1e-9, what


def limited(seen: list[int]) -> Callable[..., None]:
    """A hook around steps that looks at all there is."""

    def hook(opt: torch.optim.Optimizer, _args: Any, _options: Any) -> None:
        total = torch.stack([g.norm() for g in gradients(opt)]).norm()
        torch._foreach_mul_(gradients(opt), MOST / float(total))
        seen.append(sum(p.numel() for group in opt.param_groups for p in group["params"]))

    return hook


def program(plan: Plan | None = None) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Averaged weights, hooks around the step, a closure, a schedule, sums over the optimizer's state."""
    net: Any = user.model()
    opt: Any = user.optimizer(net, "adamw")
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    batches: Any = user.loader()
    seen: list[int] = []
    opt.register_step_pre_hook(limited(seen))
    opt.register_step_post_hook(limited(seen))
    if plan is not None:
        net, opt, batches = asa.parallelize(net, opt, batches, plan=plan)
    opt.register_step_pre_hook(limited(seen))
    average = [p.detach().clone() for p in net.parameters()]
    norms: list[float] = []
    for x, y, _number in batches:

        def closure() -> float:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)  # noqa: B023
            loss.backward()
            for p in net.parameters():
                p.grad.add_(p.detach() / p.detach().norm().clamp(min=1), alpha=0.01)
            return float(loss.detach())

        if len(norms) % 2:
            opt.step(closure)
        else:
            closure()
            opt.step()
        schedule.step()
        with torch.no_grad():
            for mine, p in zip(average, net.parameters(), strict=True):
                mine.lerp_(p, 0.1)
        assert {id(p) for group in opt.param_groups for p in group["params"]} == {id(p) for p in net.parameters()}
        if plan is None or plan.components[0].data.strategy != "zero1":  # a rank has the state of what it updates
            norms.append(sum(float(opt.state[p]["exp_avg"].norm()) for p in net.parameters()))
        else:
            norms.append(0.0)
    opt.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for mine, p in zip(average, net.parameters(), strict=True):
            p.copy_(mine)
    return net.state_dict(), norms, seen


def programs_on(_rank: int, plans: dict[str, Plan]) -> dict[str, Any]:
    return {name: program(plan) for name, plan in plans.items()}


def test_a_program_sees_whole_parameters_everywhere() -> None:
    weights, norms, seen = program()
    for found in run_ranks(
        2, programs_on, {name: plan_of(name) for name in ("mixed", "zero1 and tensor")}, threads=1, timeout_s=120
    ):
        for name, (state, mine, counts) in found.items():
            assert user.distance(state, weights) < 1e-9, name
            assert "zero1" in name or mine == pytest.approx(norms, rel=1e-9), name
            assert counts == seen, name
