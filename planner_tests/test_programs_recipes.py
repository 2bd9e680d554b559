"""Programs as training recipes have them: reductions of shards changed in place, parameters of unlike types, statistics
gathered before the model is called, groups found through modules, models of a Job."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import asa
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks
from planner_tests.programs import Named, Program, State, classes, cross_entropy, epochs, numbers
from planner_tests.stage_plans import staged


def apart(program: Program, plans: list[str]) -> dict[str, float]:
    """The largest distance of a tensor of any rank from one process, by plan."""
    alone = program.alone()
    found = {}
    for name, states in program.spread(plans).items():
        for state in states:
            assert not isinstance(state, str), (name, state)
        found[name] = max(float((s[k] - v).abs().max()) for s in states for k, v in alone.items())  # type: ignore[call-overload]
    return found


def clipped_by_units(net: Any, opt: Any, batches: Any) -> State:
    """Adaptive clipping by norms that are bounded and scaled in place."""

    def norm(x: Tensor) -> Tensor:
        return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=1, keepdim=True)

    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        for p in net.parameters():
            most = norm(p.detach()).clamp_(min=1e-3).mul_(0.1)
            size = norm(p.grad.detach())
            torch._foreach_add_([size], 1e-6)
            p.grad.detach().copy_(torch.where(size < most, p.grad, p.grad * (most / size)))
        opt.step()
    return dict(net.state_dict())


def test_norms_of_shards_may_be_changed_in_place() -> None:
    program = Program(
        model=lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)),
        x=numbers(18, 8), y=classes(18, 3), loop=clipped_by_units,
    )  # fmt: skip
    assert max(apart(program, ["fsdp", "zero2", "tensor"]).values()) < 1e-12


class Spectral(nn.Module):
    """Complex weights on the lowest modes, and a layer beside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.randn(4, 3, dtype=torch.cdouble)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        kept = torch.zeros_like(modes)
        kept[:, :, :3] = modes[:, :, :3] * self.weight
        return torch.fft.irfft(kept, n=8) + self.beside(x)  # type: ignore[no-any-return]


class Operator(nn.Module):
    """Spectral layers over four channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Spectral(), Spectral()), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.unflatten(1, (4, 2)).repeat(1, 1, 4)).flatten(1))  # type: ignore[no-any-return]


def test_parameters_of_unlike_types_are_trained_under_every_plan() -> None:
    program = Program(
        model=Operator, x=numbers(14, 8), y=classes(14, 3), loop=lambda *made: epochs(*made, loss=cross_entropy)
    )
    assert max(apart(program, ["fsdp", "zero2", "mixed-sharded"]).values()) < 1e-12


class Told(nn.Module):
    """Standardises by what the loop tells it of all samples so far."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - self.mean)  # type: ignore[no-any-return]


def told_first(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        net.mean.lerp_(asa.gather(x).mean(0), 0.5)
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
    return dict(net.state_dict())


def test_rows_are_gathered_before_the_model_is_called() -> None:
    program = Program(model=Told, x=numbers(15, 8), y=classes(15, 3), loop=told_first)
    assert max(apart(program, ["ddp", "fsdp"]).values()) < 1e-12


def grouped_by_modules(net: Any, _opt: Any, batches: Any) -> State:
    """Biases found through modules, the others because they are none of these."""
    biases = [m.bias for m in net.modules() if isinstance(m, nn.Linear)]
    others = [p for p in net.parameters() if id(p) not in set(map(id, biases))]
    opt = torch.optim.SGD([{"params": others, "weight_decay": 0.1}, {"params": biases}], lr=0.1)
    return epochs(net, opt, batches, cross_entropy)


def test_no_parameter_is_updated_twice_that_was_found_through_modules() -> None:
    program = Program(
        model=lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)),
        x=numbers(12, 8), y=classes(12, 3), loop=grouped_by_modules,
    )  # fmt: skip
    assert apart(program, ["fsdp"])["fsdp"] < 1e-12
    found = program.spread(["tensor"])["tensor"]
    assert all("is another object than that of model.parameters()" in str(rank) for rank in found)


def job_of(_rank: int, program: Program, plans: dict[str, Plan]) -> dict[str, Any]:
    """What becomes of a model that was handed to a Job, when the program freezes it, penalises it, and loads it."""
    found: dict[str, Any] = {}
    for name, plan in plans.items():
        net, opt, batches = program.made()
        job = asa.Job(net, opt, batches, nn.functional.cross_entropy, plan, replan=False)
        job.run(epochs=1)
        for what, use in (
            ("frozen", lambda net=net: net.first.requires_grad_(False)),
            ("penalised", lambda net=net: sum(p.norm() for p in net.parameters())),
        ):
            try:
                use()
                found[f"{name}, {what}"] = "allowed"
            except UsageError as error:
                found[f"{name}, {what}"] = str(error)
        job.run(epochs=2)
        state = job.state_dict()
        net.load_state_dict(state, assign=True)
        found[name] = state
        found[f"{name}, loaded"] = all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
        job.close()
    return found


def frozen_behind_an_epoch(net: Any, opt: Any, batches: Any) -> State:
    epochs(net, opt, batches, cross_entropy)
    net.first.requires_grad_(False)
    opt.zero_grad()
    return epochs(net, opt, batches, cross_entropy)


def test_a_model_in_a_job_is_changed_on_the_ranks_that_train_it_or_its_use_is_refused() -> None:
    program = Program(model=Named, x=numbers(12, 8), y=classes(12, 3), loop=frozen_behind_an_epoch)
    plans = {"ddp": program.plan("ddp"), "tensor": program.plan("tensor")}
    plans["1f1b"] = staged(plans["tensor"], (1, 1), microbatches=2)
    alone = program.alone()
    by_rank = run_ranks(2, job_of, program, plans, threads=1, timeout_s=120)
    for found in by_rank:
        for name in ("ddp", "1f1b"):
            assert found[f"{name}, frozen"] == "allowed"
            assert max(float((found[name][n] - t).abs().max()) for n, t in alone.items()) < 1e-12
        assert "the model that was handed to asa.Job is used" in found["tensor, frozen"]
        assert found["ddp, penalised"] == "allowed" != found["tensor, penalised"]
        assert "ranks train others in its place" in found["1f1b, penalised"]
        assert all(found[f"{name}, loaded"] for name in plans)


class Scaled(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.head(x * scale)  # type: ignore[no-any-return]


def test_a_job_passes_several_inputs_of_which_the_loader_makes_a_list() -> None:
    x, scale, y = numbers(8, 8), numbers(8, 8, seed=2), classes(8, 3)
    samples: Any = [((x[i], scale[i]), y[i]) for i in range(8)]
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        net = Scaled().double()
        opt, batches = torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples, 4)
        if states:
            asa.Job(net, opt, batches, nn.functional.cross_entropy, cache=None).run(epochs=1)
        else:
            epochs(
                net,
                opt,
                [((a, b), c) for (a, b), c in batches],
                lambda net, x, y: nn.functional.cross_entropy(net(*x), y),
            )
        states.append(net.state_dict())
    assert all(torch.allclose(t, states[1][n], rtol=1e-12) for n, t in states[0].items())
