"""Optimizers and loops of many kinds: the numbers of one process, or one line that says what cannot be had."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests import user_programs as user
from planner_tests.nouns import cluster
from planner_tests.programs import LAYOUTS, Program, State, assert_as_alone, classes, cross_entropy, epochs, numbers
from planner_tests.test_api_job import loss_fn, pipeline
from planner_tests.test_api_loop import in_float64, plan_of

X, Y = numbers(19, 8), classes(19, 4)
"""The last batch of 6 has one sample; of 8, three."""


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))


def first_part(net: nn.Module) -> torch.optim.Optimizer:
    opt = torch.optim.SGD(list(net.parameters())[:2], lr=0.1, momentum=0.9)
    opt.second = torch.optim.Adam(list(net.parameters())[2:], lr=0.01)  # type: ignore[attr-defined]
    return opt


def two_optimizers(net: nn.Module, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        opt.second.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
        opt.second.step()
    return dict(net.state_dict())


def test_a_second_optimizer_updates_too() -> None:
    assert_as_alone(Program(model=chain, x=X, y=Y, optimizer=first_part, loop=two_optimizers), within=1e-9)


class SharedOut(torch.optim.SGD):
    """Shares out parameters over processes itself: each updates its own, and sends them to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            if not dist.is_initialized() or i % 2 == dist.get_rank():
                p.sub_(p.grad / p.grad.norm(), alpha=0.1)
            if dist.is_initialized():
                dist.broadcast(p, i % 2)


def shared_out(net: nn.Module) -> torch.optim.Optimizer:
    return SharedOut(net.parameters())


@pytest.mark.parametrize("plan", ["mixed", "zero1"])
def test_an_optimizer_that_sends_parameters_itself_is_refused_where_a_rank_has_a_part_of_them(plan: str) -> None:
    program = Program(model=chain, x=X, y=Y, optimizer=shared_out, loop=lambda *a: epochs(*a, cross_entropy))
    for said in program.spread([plan])[plan]:
        assert isinstance(said, str)
        assert "SharedOut.step() calls torch.distributed.broadcast, and the plan has a rank update only" in said
    assert_as_alone(program, ["ddp"])


def by_turns(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    """Each rank updates parameters of its own in the loop, and sends them to the others."""
    spread = dist.is_initialized()
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                if not spread or i % 2 == dist.get_rank():
                    p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
                if spread:
                    dist.broadcast(p.data, i % 2)
    return dict(net.state_dict())


@pytest.mark.parametrize("plan", ["tensor", "fsdp"])
def test_parameters_in_parts_that_ranks_update_by_turns_are_refused(plan: str) -> None:
    for said in Program(model=chain, x=X, y=Y, loop=by_turns).spread([plan])[plan]:
        assert isinstance(said, str)
        assert "torch.distributed.broadcast of a tensor that ranks hold in parts, behind changes" in said


def penalised(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).square().mean()


def only_penalised(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("loss", [penalised, only_penalised])
def test_gradient_penalty_and_uneven_batches(loss: Any) -> None:
    def loop(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
        return epochs(net, opt, batches, loss)

    assert_as_alone(Program(model=chain, x=X, y=Y, batch=8, loop=loop), ["ddp", "zero1"])


def accumulating(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    averages = [p.detach().clone() for p in net.parameters()]
    for i, (x, y) in enumerate(batches):
        (cross_entropy(net, x, y) / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
            for a, p in zip(averages, net.parameters(), strict=True):
                a.mul_(0.9).add_(p.detach(), alpha=0.1)
    return dict(net.state_dict())


def test_accumulation_clipping_and_averages() -> None:
    assert_as_alone(Program(model=chain, x=X, y=Y, loop=accumulating), ["ddp", "zero2", "mixed-sharded"])


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((mean * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


def test_an_optimizer_that_is_said_to_update_element_by_element() -> None:
    def loop(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
        return epochs(net, opt, batches, cross_entropy)

    made = Program(model=chain, x=X, y=Y, optimizer=lambda net: Lion(net.parameters()), loop=loop)
    assert_as_alone(Program(**(made.__dict__ | {"options": {"elementwise": True}})))


def asked(rank: int, cache: Path) -> list[str]:
    """What is answered to wishes that cannot be had, and to some that can."""
    found = []
    cases: list[tuple[Any, tuple[str, ...] | None, bool | None]] = [
        (Lion, ("fsdp",), None), (Lion, ("fsdp", "tensor"), None), (Lion, ("ddp",), None), (Lion, ("fsdp",), True),
        (torch.optim.Adafactor, ("zero2",), None), (torch.optim.Adafactor, ("ddp", "fsdp"), None), (Lion, None, None),
    ]  # fmt: skip
    for kind, strategies, declared in cases:
        net = user.model().float()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                placed, _, _ = asa.parallelize(
                    net, kind(net.parameters(), lr=0.01), user.loader(), strategies=strategies, elementwise=declared,
                    cluster=cluster(), cache=cache, time_limit_s=0.1, example_input=torch.zeros(2, *user.SHAPE),
                )  # fmt: skip
            except UsageError as error:
                found.append(str(error))
                continue
        assert placed.plan is not None
        said = " ".join(str(w.message) for w in heard if "whole" in str(w.message))
        found.append(f"{placed.plan.strategy} {said}".strip())
    return found


def test_strategies_are_obeyed_or_refused(tmp_path: Path) -> None:
    for rank, answers in enumerate(run_ranks(2, asked, tmp_path, threads=1, timeout_s=120)):
        sharded, either, plain, declared, factored, both, free = answers
        assert sharded.startswith("Lion is not known to update element by element (say elementwise=True if it does)")
        assert "(fsdp)" in sharded
        assert "(fsdp, tensor)" in either
        assert (plain, declared, both) == ("ddp", "fsdp", "ddp")
        assert factored.startswith("Adafactor uses all elements of a parameter together")
        assert free.split()[0] in ("ddp", "single")
        assert ("Lion is not known" in free) == (rank == 0)


def clipped(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.register_step_pre_hook(
        lambda o, *_: nn.utils.clip_grad_norm_([p for g in o.param_groups for p in g["params"]], 0.05) and None
    )


def jobs(_rank: int, plans: list[Any]) -> list[State]:
    states = []
    for plan in plans:
        for hook in (False, True):
            net = user.model()
            opt = user.optimizer(net)
            if hook:
                clipped(net, opt)
            job = asa.Job(net, opt, user.loader(), loss_fn, plan, max_norm=None if hook else 0.05, replan=False)
            job.run(1)
            states.append(job.state_dict())
            job.close()
    return states


def test_a_job_clips_the_norm_of_the_whole_model() -> None:
    net = user.model()
    opt = user.optimizer(net)
    job = asa.Job(net, opt, user.loader(), loss_fn, max_norm=0.05, cache=None)
    job.run(1)
    wanted = job.state_dict()
    plain = asa.Job(other := user.model(), user.optimizer(other), user.loader(), loss_fn, cache=None)
    plain.run(1)
    assert user.distance(plain.state_dict(), wanted) > 1e-3
    plans = [in_float64(plan_of(*LAYOUTS[n])) for n in ("ddp", "zero1", "tensor", "mixed-sharded")] + [pipeline()]
    for states in run_ranks(2, jobs, plans, threads=1, timeout_s=120):
        for state in states:
            assert user.distance(state, wanted) < 1e-10


def scheduled(
    out: Path | None, epochs: int, *, every: str = "epoch", resume: bool = False
) -> tuple[list[float], State]:
    net = user.model()
    opt = user.optimizer(net)
    kinds = [torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), torch.optim.lr_scheduler.MultiStepLR(opt, [1, 3], 0.7)]
    job = asa.Job(
        net, opt, user.loader(), loss_fn, scheduler=kinds, scheduler_every=every, out=out, resume=resume, cache=None
    )  # type: ignore[arg-type]
    job.run(epochs)
    found = [g["lr"] for g in opt.param_groups], job.state_dict()
    job.close()
    return found


@pytest.mark.parametrize("every", ["epoch", "step"])
def test_a_job_keeps_its_schedules_and_resumes_them(tmp_path: Path, every: str) -> None:
    rates, state = scheduled(None, 4, every=every)
    steps = 4 if every == "epoch" else 16
    wanted = 0.5 ** (steps // 2) * 0.7**2
    assert rates == pytest.approx([0.05 * wanted, 0.02 * wanted])
    scheduled(tmp_path / "run", 2, every=every)
    again, resumed = scheduled(tmp_path / "run", 4, every=every, resume=True)
    assert again == pytest.approx(rates)
    assert user.distance(resumed, state) < 1e-12


def test_schedules_that_cannot_be() -> None:
    net, other = user.model(), user.model()
    opt = user.optimizer(net)
    foreign = torch.optim.lr_scheduler.StepLR(user.optimizer(other), 1)
    with pytest.raises(UsageError, match="StepLR is a schedule of another optimizer"):
        asa.Job(net, opt, user.loader(), loss_fn, scheduler=foreign)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    with pytest.raises(UsageError, match="looks at the loss of an epoch"):
        asa.Job(net, opt, user.loader(), loss_fn, scheduler=plateau, scheduler_every="step")
