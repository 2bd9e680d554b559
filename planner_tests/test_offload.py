"""Optimizer state on the host: what it saves and costs, when it is offered, and that training stays the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import known_models
import nouns
import pytest
import torch
import training

from asa.cost.constants import constant
from asa.cost.machine import presets
from asa.cost.memory.peak import needed
from asa.errors import UsageError
from asa.executor.measuring.equivalence import verify
from asa.executor.model.materialize import materialize
from asa.executor.model.offload import HostCopies, updated_in
from asa.executor.model.state import full_optimizer_state, full_state
from asa.executor.model.step import played
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.optimizer import build_optimizer
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.launch import run_ranks
from asa.planner import Request, plan
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.scheduler import adapt
from asa.strategies import offered
from planner_tests.hand_plans import copy_of, hand_plan, uniform
from planner_tests.small_models import INPUT, build
from planner_tests.test_zero import STRATEGIES, plan_of
from planner_tests.verified import verified


@cache
def transformer() -> Profile:
    """A model whose state weighs more than its activations."""
    return known_models.profile(known_models.transformer(), 500.0, 64)


def offloaded(made: Plan, which: Any = lambda _i: True) -> Plan:
    return replace(made, components=tuple(replace(c, offload=bool(which(i))) for i, c in enumerate(made.components)))


def test_it_saves_the_state_and_costs_two_transfers_and_an_update() -> None:
    cluster, profile = presets.load("a100-nvlink-8"), transformer()
    space = Space(profile, cluster, offered(), Request(gpus=8, global_batch=64, optimizer="adamw", offload="always"))
    heaviest = max(range(len(profile.graph)), key=lambda i: profile.graph.components[i].parameter_bytes)
    layout = Layout(width=8, data=8, tensor=1)
    pricer = Prices(space).pricer(8, 1)
    found = {
        w.data.strategy: pricer.component(heaviest, w)
        for w in space.ways(heaviest, 8, 1)
        if w.layout == layout and not w.checkpoint
    }
    stays = {
        w.data.strategy: pricer.component(heaviest, replace(w, offload=False))
        for w in space.ways(heaviest, 8, 1)
        if w.layout == layout and not w.checkpoint
    }
    size = profile.graph.components[heaviest].parameter_bytes
    for name, part in (("replicate", 1), ("zero3", 8)):
        saved = stays[name].footprint.state - found[name].footprint.state
        assert saved == pytest.approx(2 * size / part)
        moved = 2 * size / part / cluster.device.host_bandwidth
        computed = 7 * size / part * 8 / constant("host_update_bandwidth")
        assert found[name].update_s == pytest.approx(moved + computed)
        assert found[name].update_s > stays[name].update_s
        assert found[name].forward_s == stays[name].forward_s


def test_it_is_offered_where_plain_data_parallelism_does_not_fit() -> None:
    cluster, profile = presets.load("a100-nvlink-8"), transformer()
    usual = Request(gpus=8, global_batch=64, optimizer="adamw", strategies=("ddp",), prefer_simple=False)
    whole = plan(profile, cluster, offered(), usual)[0]
    assert not any(c.offload for c in whole.components)

    def offloading(**wishes: Any) -> bool:
        return Prices(Space(profile, cluster, offered(), replace(usual, **wishes))).space.offloading

    state = 4 * sum(c.parameter_bytes for c in profile.graph.components)
    tight = needed(cluster.device, 0.8 * state, 8)
    assert not offloading()
    assert not offloading(global_batch=4), "fewer samples than devices are no lack of memory"
    assert offloading(memory_bytes=tight)
    assert not offloading(memory_bytes=tight, offload="never")
    assert offloading(offload="always")
    assert not Prices(Space(profile, nouns.cluster(2), offered(), replace(usual, gpus=2))).space.offloading


def test_it_is_chosen_where_nothing_else_fits_on_one_device() -> None:
    cluster, profile = presets.load("a100-nvlink-8"), transformer()
    state = 4 * sum(c.parameter_bytes for c in profile.graph.components)
    request = Request(
        gpus=1, global_batch=8, optimizer="adamw", memory_bytes=needed(cluster.device, 0.85 * state, 1), solver="dp"
    )
    found = plan(profile, cluster, offered(), request)[0]
    assert 0 < sum(c.offload for c in found.components) < len(found.components), "no more of it than memory asks for"
    assert "offload" in found.certificate.space
    assert any("on the host" in note for note in found.notes)
    with pytest.raises(Exception, match="fits"):
        plan(profile, cluster, offered(), replace(request, offload="never"))


def test_where_it_is_asked_for_no_component_goes_without() -> None:
    profile = transformer()
    request = Request(gpus=2, global_batch=8, optimizer="adamw", offload="always", time_limit_s=0.1)
    found = plan(profile, presets.load("a100-nvlink-8"), offered(), request)[0]
    assert [c.offload for c in found.components] == [c.parameter_bytes > 0 for c in profile.graph.components]


def test_on_a_cpu_it_saves_nothing_and_is_refused() -> None:
    with pytest.raises(UsageError, match="saves nothing"):
        plan(nouns.profile(), nouns.cluster(2), offered(), Request(gpus=2, global_batch=8, offload="always"))
    with pytest.raises(UsageError, match="offload"):
        Request(gpus=2, global_batch=8, offload="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_updates_are_bitwise_those_of_the_device(optimizer: Any) -> None:
    def weights(away: bool) -> list[torch.Tensor]:
        model = build("plain")
        parameters = list(model.parameters())
        made = build_optimizer(optimizer, parameters, lr=0.1, offloaded=set(parameters[::2]) if away else ())
        for step in range(4):
            torch.manual_seed(step)
            if step == 2:  # as when a checkpoint is loaded
                with torch.no_grad():
                    parameters[0].mul_(0.5)
            model.zero_grad()
            model.eval()(torch.randn(4, *INPUT)).square().sum().backward()
            made.step()
        if away:
            known = updated_in(made, parameters[0])
            assert known is not parameters[0]
            assert made.state[known]
            assert not made.state.get(parameters[0])
        return parameters

    for here, there in zip(weights(False), weights(True), strict=True):
        assert torch.equal(here, there)


def test_a_parameter_without_gradient_stays_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    made = build_optimizer("sgd", [parameter], lr=0.1, offloaded={parameter})
    made.step()
    assert torch.equal(parameter, torch.ones(3))
    parameter.grad = torch.ones(3)
    made.step()
    assert torch.allclose(parameter, torch.full((3,), 0.9), atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan_of("plain", [2], lambda i: ("replicate", "zero1", "zero2", "zero3")[i % 4], optimizer="adamw"),
        lambda: plan_of("blocks", [1, 1], "replicate", schedule="gpipe", optimizer="adamw"),
    ],
    ids=["zero-adamw", "stages-adamw"],
)
def test_training_is_that_of_one_device(make: Any) -> None:
    made = offloaded(make(), lambda i: i % 5 != 2)
    name = "plain" if len(made.components) == len(plan_of("plain", [2], "zero1").components) else "blocks"
    found = verified(made, name, even=True)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def _trained(rank: int, made: Plan, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    model = materialize(
        made, copy_of("plain", even=True), torch.zeros((2, *INPUT)), rank=rank, strategies=STRATEGIES, device=place
    )
    optimizer = build_optimizer(made.optimizer, model.updated, lr=0.01, offloaded=model.offloaded)
    model.train()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn((12, *INPUT), generator=generator).to(place)
        y = torch.randint(100, (12,), generator=generator).to(place)
        model.zero_grad()
        played(model, torch.arange(12), step, lambda rows, x=x: x[rows], lambda rows, y=y: y[rows])
        optimizer.step()
        model.share_updates()
    return full_state(model), full_optimizer_state(model, optimizer)


def test_gathered_state_is_the_same_wherever_it_is() -> None:
    def strategy(i: int) -> str:
        return ("replicate", "zero1", "zero3")[i % 3]

    made = plan_of("plain", [2], strategy, optimizer="adamw", microbatches=1, degrees=lambda _i, w: (w, 1))
    here, there = (run_ranks(2, _trained, p, threads=1, timeout_s=120)[0] for p in (made, offloaded(made)))
    for a, b in zip(here, there, strict=True):
        assert set(a) == set(b)
        assert a
        for name, value in a.items():
            assert torch.equal(value, b[name]), name


def test_runs_are_continued_on_either_side(tmp_path: Path) -> None:
    """A checkpoint says the same whoever wrote it: an epoch here and one there are two epochs in one place."""
    make: dict[str, Any] = {"strategies": STRATEGIES, "adapt": adapt}
    usual: dict[str, Any] = {"steps_per_epoch": 2, "lr": 0.01, "warmup": 0.0}
    base = training.plan("logistic", ranks=2, optimizer="adamw")
    zero3 = replace(base, components=tuple(replace(c, data=replace(c.data, strategy="zero3")) for c in base.components))
    weights = []
    for name, plans in (
        ("away", (base, offloaded(zero3))),
        ("back", (offloaded(base), zero3)),
        ("here", (base, zero3)),
    ):
        for epochs, made in enumerate(plans, start=1):
            settings = training.settings(tmp_path / name, epochs=epochs, resume=epochs > 1, **usual)
            train(made, settings, **make)
        found = checkpoint.find(tmp_path / name / outdir.CHECKPOINTS)
        weights.append(
            checkpoint.read(found.path, checkpoint.MODEL) | checkpoint.read(found.path, checkpoint.OPTIMIZER)
        )
    *others, here = weights
    for other in others:
        assert set(other) == set(here)
        assert all(torch.equal(other[n], here[n]) for n in here)


def test_copies_know_what_was_written_behind_their_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copies = HostCopies([parameter])
    copies.take()
    copies.give()
    with torch.no_grad():
        parameter.fill_(3.0)
    copies.take()
    assert torch.equal(copies.of[parameter], torch.full((2,), 3.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_gpu_it_saves_memory_and_trains_the_same(optimizer: str) -> None:
    base = hand_plan(
        build("plain", even=True), 1, uniform(1, 1), input_shape=INPUT, num_classes=100, optimizer=optimizer
    )
    found = verify(offloaded(base), partial(build, "plain", even=True), STRATEGIES, device="cuda", timeout_s=120)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"

    def held(away: bool) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        parameter = torch.nn.Parameter(torch.ones(1 << 22, device="cuda"))
        made = build_optimizer(optimizer, [parameter], lr=0.1, offloaded={parameter} if away else ())  # type: ignore[arg-type]
        parameter.grad = torch.ones_like(parameter)
        made.step()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    words = {"sgd": 1, "adamw": 2}[optimizer]
    assert held(False) - held(True) == pytest.approx(words * (4 << 22), rel=0.01)
