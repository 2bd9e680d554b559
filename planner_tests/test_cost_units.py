"""The peak of a rank whose largest component dominates, measured on two real ranks: never under, and not far over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asa.cost.planned import price_plan
from asa.executor.measuring.benchmark import BenchOptions, Entrant, _memory
from asa.executor.model.step import _flight_of
from asa.executor.model.votes import Votes
from asa.executor.observing.random_inputs import random_inputs
from asa.instruments.allocations import Event, completed, peak
from asa.interfaces.units import gathered_once, released
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.traffic import Adjacent, Share
from asa.launch import run_ranks
from asa.profiler.measure import profile_module
from asa.sharding.collectives import segment
from asa.sharding.gradients.updates import owners
from asa.strategies import offered
from asa.strategies.zero1 import SharedOptimizer
from asa.zoo.data import GlobalOrder
from planner_tests import nouns
from planner_tests.hand_plans import hand_plan, uniform

SHAPE, CLASSES, BATCH = (1, 16, 16), 32, 16


def model() -> nn.Module:
    """Layers of 0.5, 4 (or 2 and 2), 1 and 0.06 MiB."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


@cache
def profile_of(build: Callable[[], nn.Module], batch: int) -> Profile:
    """Measured once for all tests that ask."""
    return profile_module(
        build(), torch.zeros((2, *SHAPE)), spec=build.__name__, num_classes=CLASSES, global_batch=batch,
        device=torch.device("cpu"), time_limit_s=10.0, max_tensor_degree=1,
    )  # fmt: skip


def plan_of(strategy: str, optimizer: str, microbatches: int) -> Plan:
    """``strategy`` of all components, or, after a slash, of the second one and those behind it."""
    first, *rest = strategy.split("/")
    return hand_plan(
        model(), 2, uniform(2, 1), input_shape=SHAPE, num_classes=CLASSES,
        data_strategy=lambda i: rest[0] if rest and i > 0 else first,
        global_batch=BATCH, num_microbatches=microbatches, optimizer=optimizer,
    )  # fmt: skip


def _rank(rank: int, plans: list[Plan]) -> list[int]:
    votes, found = Votes(120), []
    for plan in plans:
        images, device = random_inputs(plan, torch.device("cpu")), torch.device("cpu")
        order = GlobalOrder(len(images), plan.global_batch, 0, drop_last=True)
        entrant = Entrant(plan, model, offered(), rank, votes, BenchOptions(), device)
        entrant.turn(images, order, 2)
        found.append(_memory(entrant, images, order))
    return found


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3", "replicate/zero3"])
def test_the_bound_covers_the_peak_of_two_ranks_closely(strategy: str) -> None:
    profile = profile_of(model, BATCH)
    plans = [plan_of(strategy, o, m) for o, m in (("sgd", 1), ("adamw", 1), ("sgd", 4))]
    measured = run_ranks(2, _rank, plans, threads=1, timeout_s=120)
    for i, plan in enumerate(plans):
        highest = max(found[i] for found in measured)
        predicted = price_plan(plan, profile, nouns.cluster(2), offered()).stages[0].most
        assert highest <= predicted <= 1.1 * highest, (plan.optimizer, plan.num_microbatches)


class Wide(nn.Module):
    """A block whose gradients inside are as large as its weights, and most before those of ``first`` are made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 2048), nn.Linear(2048, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), Wide(), nn.Linear(256, CLASSES))


def _wide_rank(rank: int, plan: Plan) -> int:
    images, device = random_inputs(plan, torch.device("cpu")), torch.device("cpu")
    order = GlobalOrder(len(images), plan.global_batch, 0, drop_last=True)
    entrant = Entrant(plan, wide, offered(), rank, Votes(120), BenchOptions(), device)
    entrant.turn(images, order, 2)
    return _memory(entrant, images, order)


@pytest.mark.parametrize(("strategy", "ranks"), [("replicate", 1), ("zero2", 2), ("zero3", 2)])
def test_gradients_that_backward_has_not_made_yet_are_not_counted(strategy: str, ranks: int) -> None:
    samples = 256
    profile = profile_of(wide, ranks * samples)
    plan = hand_plan(
        wide(), ranks, uniform(ranks, 1), input_shape=SHAPE, num_classes=CLASSES, data_strategy=lambda _i: strategy,
        global_batch=ranks * samples, optimizer="sgd",
    )  # fmt: skip
    highest = max(run_ranks(ranks, _wide_rank, plan, threads=1, timeout_s=120))

    def predicted(profile: Profile) -> float:
        return price_plan(plan, profile, nouns.cluster(2), offered()).stages[0].most

    assert highest <= predicted(profile) <= 1.1 * highest
    before = replace(profile, timings=tuple(replace(t, unmade_bytes=0) for t in profile.timings))
    assert predicted(before) > 1.1 * highest


class Passing(nn.Module):
    """Forward makes much that it lets go of again; nothing follows that would be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 4096), nn.Linear(4096, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().repeat(1, 32).abs().mean(1, keepdim=True)
        return x[:, :CLASSES] + self.last(torch.tanh(self.first(x * scale)))


def passing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), Passing())


def _passing_rank(rank: int, plan: Plan) -> int:
    segment.every_core_taken = lambda: True
    images, device = random_inputs(plan, torch.device("cpu")), torch.device("cpu")
    order = GlobalOrder(len(images), plan.global_batch, 0, drop_last=True)
    entrant = Entrant(plan, passing, offered(), rank, Votes(120), BenchOptions(), device)
    entrant.turn(images, order, 2)
    return _memory(entrant, images, order)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_in_forward_the_buffer_of_the_last_weights_is_still_there(strategy: str) -> None:
    samples = 256
    profile = profile_of(passing, 2 * samples)
    plan = hand_plan(
        passing(), 2, uniform(2, 1), input_shape=SHAPE, num_classes=CLASSES, data_strategy=lambda _i: strategy,
        global_batch=2 * samples, optimizer="sgd",
    )  # fmt: skip
    highest = max(run_ranks(2, _passing_rank, plan, threads=1, timeout_s=120))
    cluster = replace(nouns.cluster(2), shared_memory=True)
    assert highest <= price_plan(plan, profile, cluster, offered()).stages[0].most <= 1.1 * highest


def share(size: float) -> Share:
    return Share(
        parameter_bytes=size, largest_parameter_bytes=size / 2, num_parameter_tensors=2, buffer_bytes=0,
        flops_per_sample=1, saved_bytes_per_sample=1,
    )  # fmt: skip


@pytest.mark.parametrize("held", [released, gathered_once])
@pytest.mark.parametrize("around", [{}, {"num_microbatches": 2}], ids=["once", "accumulated"])
def test_more_around_is_never_less(held: Any, around: dict[str, Any]) -> None:
    alone = Adjacent(rest=100.0, **around)
    least = held(share(100.0), 4, alone)
    for more in ({"front": 80.0}, {"behind": 80.0}, {"copying": True}):
        assert held(share(100.0), 4, replace(alone, **more)) >= least
    assert held(share(100.0), 4, replace(alone, saved=30.0)) <= least


def test_a_unit_that_dominates_is_there_twice_with_its_part_counted_apart() -> None:
    """Weights and gradients, or, on CPUs, the buffer they are scattered from and what is received."""
    assert released(share(100.0), 2, Adjacent(rest=100.0)) == 150.0
    assert released(share(100.0), 2, Adjacent(rest=100.0, copying=True)) == 200.0
    assert released(share(27.0), 2, Adjacent(front=27.0, behind=27.0, rest=54.0, copying=True)) == 3.5 * 27


def test_what_another_thread_lets_go_of_is_not_held_for_ever() -> None:
    events = [
        Event(at=1, pointer=1, size=10),  # a gradient, which outlives the record
        Event(at=2, pointer=2, size=50),  # a copy whose release is not noted
        Event(at=3, pointer=3, size=20),
        Event(at=4, pointer=3, size=-20),
        Event(at=5, pointer=2, size=30),  # its memory is used again
        Event(at=6, pointer=2, size=-30),
    ]
    assert peak(completed(events, {1})) == 60
    assert peak(completed(events, {1, 2})) == 60
    assert peak(completed(events[:2], set())) == 50


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(2, 5))
def test_parameters_that_are_shared_out_together_are_priced_together(sizes: list[list[int]], ranks: int) -> None:
    """No less than the owner of most has, and the whole of it at most; of one component as of many."""
    shares = [
        replace(share(sum(c)), largest_parameter_bytes=max(c), num_parameter_tensors=len(c), parameter_bytes=sum(c))
        for c in sizes
    ]
    every, held = [s for c in sizes for s in c], [0] * ranks
    for size, owner in zip(every, owners(every, ranks), strict=True):
        held[owner] += size
    page = SharedOptimizer()
    found = page.together(shares, ranks, "adamw")
    assert 2 * max(held) <= found + 1e-9 <= 2 * sum(every) + 1e-6
    assert page.together(shares[:1], ranks, "adamw") == page.memory(shares[0], ranks, "adamw").optimizer
    assert page.together(shares, 2 * ranks, "adamw") <= found + 1e-9


def test_what_has_left_a_stage_is_not_held_nor_is_the_gradient_that_came_for_it() -> None:
    entry = torch.ones(4, requires_grad=True)
    value = entry + 1
    flight, sent = _flight_of(entry, value), weakref.ref(value)
    del value
    assert sent() is None
    flight.arrived.append(torch.arange(4.0))
    flight.exit.backward()
    assert entry.grad is not None
    assert entry.grad.tolist() == [0, 1, 2, 3]
    assert not flight.arrived
