"""Gathering and scattering without gloo's own copies: the same results as the stock operations."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from asa.launch import run_ranks
from asa.sharding.collectives import along_axis as collectives
from asa.sharding.collectives import direct, segment
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.direct import (
    Pending,
    all_gather_into_tensor,
    all_reduce,
    awaited,
    directly,
    reduce_scatter_tensor,
)
from asa.sharding.gradients.sharded import sharded


def _compare(rank: int, ranks: int, apart: bool) -> list[str]:
    wrong = []
    if apart:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    for words in (1, 7, 4096):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.manual_seed(rank)
            part, whole = torch.randn(words).to(dtype), torch.randn(words * ranks).to(dtype)
            expected, found = whole.new_empty(words * ranks), whole.new_empty(words * ranks)
            dist.all_gather_into_tensor(expected, part)
            all_gather_into_tensor(found, part)
            wrong += [] if torch.equal(found, expected) else [f"gather {words} {dtype}"]
            inside = whole.new_empty(words * ranks)
            inside[rank * words : (rank + 1) * words] = part
            pending = all_gather_into_tensor(inside, inside[rank * words : (rank + 1) * words], async_op=True)
            assert isinstance(pending, dist.Work if apart else Pending)
            pending.wait()
            wrong += [] if torch.equal(inside, expected) else [f"gather in place {words} {dtype}"]
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                before = whole.clone()
                a, b = whole.new_empty(words), whole.new_empty(words)
                dist.reduce_scatter_tensor(a, whole.clone(), op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op)
                reduce_scatter_tensor(b, whole, op=op)
                a = a / ranks if op == dist.ReduceOp.AVG else a
                near = torch.allclose(a.double(), b.double(), rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=0.05)
                wrong += [] if near and torch.equal(whole, before) else [f"scatter {words} {dtype} {op}"]
    return wrong


@pytest.mark.parametrize(("ranks", "apart"), [(2, False), (3, False), (3, True)])
def test_results_are_those_of_the_stock_operations(ranks: int, apart: bool) -> None:
    assert run_ranks(ranks, _compare, ranks, apart, threads=1, timeout_s=120) == [[]] * ranks


def _summed(rank: int, ranks: int) -> list[bool]:
    """Whether sums by messages are the stock ones, to the bit."""
    segment.every_core_taken = lambda: False
    right = []
    for words in (0, 1, 7, 4096):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.manual_seed(rank)
            found = torch.randn(words).to(dtype)
            expected = found.clone()
            all_reduce(found)
            dist.all_reduce(expected)
            right.append(torch.equal(found, expected))
    return right


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_the_stock_ones(ranks: int) -> None:
    assert run_ranks(ranks, _summed, ranks, threads=1, timeout_s=120) == [[True] * 12] * ranks


class _Work:
    """Its future (itself) is done after so many looks at it, or once it is waited for."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waits = looks, 0

    def get_future(self) -> _Work:
        return self

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize(("ranks", "here", "cores", "awake"), [(2, 2, 2, 5), (2, 2, 1, 0), (2, 1, 2, 0)])
def test_who_waits_keeps_a_core_of_its_own(
    ranks: int, here: int, cores: int, awake: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields: list[int] = []
    monkeypatch.setattr(direct.os, "sched_yield", lambda: yields.append(1))
    monkeypatch.setattr(segment, "usable_cores", lambda: cores)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    work = _Work(5)
    awaited(work)  # type: ignore[arg-type]
    assert (len(yields), work.waits) == (awake, 1)
    awaited(None)


def test_nobody_stays_awake_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(direct.time, "perf_counter", lambda: 0.02 * next(seconds))
    monkeypatch.setattr(direct, "own_cores", lambda: True)
    work = _Work(90)
    awaited(work)  # type: ignore[arg-type]
    assert work.waits == 1
    assert work.looks >= 85, "it gave up"


def _gathered_by(_rank: int, ranks_here: int) -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_here)
    segment.every_core_taken = lambda: False
    assert segment.segment_of(None) is None
    called: list[str] = []
    for name in ("broadcast", "all_gather_into_tensor"):
        usual = getattr(dist, name)

        def noted(*args: Any, name: str = name, usual: Any = usual, **options: Any) -> Any:
            called.append(name)
            return usual(*args, **options)

        setattr(dist, name, noted)
    all_gather_into_tensor(torch.empty(12), torch.ones(4))
    return called


@pytest.mark.parametrize(("here", "by"), [(3, ["broadcast"] * 3), (1, ["all_gather_into_tensor"])])
def test_a_gather_is_a_ring_over_a_network_and_broadcasts_on_one_host(here: int, by: list[str]) -> None:
    assert run_ranks(3, _gathered_by, here, threads=1, timeout_s=120) == [by] * 3


class _Segment(nn.Module):
    """One unit, in the form that strategies shard."""

    def __init__(self) -> None:
        super().__init__()
        self.components = nn.ModuleList([nn.Linear(6, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.components[0](x)
        return y


def _units(rank: int, shared: bool) -> tuple[bool, list[str]]:
    """Whether gradients of a sharded unit are those of the stock one, and which collectives made them."""
    segment.every_core_taken = lambda: shared
    torch.manual_seed(0)
    ours, stock = _Segment(), nn.Linear(6, 5)
    stock.load_state_dict(ours.components[0].state_dict())
    group = dist.group.WORLD
    assert group is not None
    sharded(ours, Axis(size=2, index=rank, group=group), release=True)
    fully_shard(stock, mesh=DeviceMesh.from_group(group, "cpu"))
    x = torch.randn(4, 6)
    stock(x).square().mean().backward()
    called = []

    def noted(room: Any, name: str) -> Any:
        usual = getattr(room, name)

        def call(*args: object, **options: object) -> object:
            called.append(name)
            return usual(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for room, name in ((dist, "all_to_all_single"), (segment.Segment, "reduce_scatter")):
            patched.setattr(room, name, noted(room, name))
        ours(x).square().mean().backward()
    pairs = zip(ours.parameters(), stock.parameters(), strict=True)
    return all(torch.allclose(a.grad.to_local(), b.grad.to_local()) for a, b in pairs), called  # type: ignore[union-attr]


@pytest.mark.parametrize(("shared", "by"), [(False, ["all_to_all_single"]), (True, ["reduce_scatter"])])
def test_sharded_units_gather_and_scatter_this_way(shared: bool, by: list[str]) -> None:
    assert run_ranks(2, _units, shared, threads=1, timeout_s=120) == [(True, by)] * 2


def test_a_module_that_is_no_unit_is_left_alone() -> None:
    plain, touched = nn.Linear(2, 2), nn.Linear(2, 2)
    directly(touched)
    assert vars(touched).keys() == vars(plain).keys()
    assert touched.state_dict().keys() == plain.state_dict().keys()


def _recorded(rank: int) -> float:
    small = torch.full((4,), float(rank))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.autograd.profiler.profile(profile_memory=True), hooks:
        for _ in range(2000):
            all_reduce(small)
            small /= 2
    return small[0].item()


def test_waiting_awake_under_a_profiler_locks_nobody_out() -> None:
    """Gloo's thread takes the GIL with the work's lock in hand, where tensors that are saved go through hooks."""
    assert run_ranks(2, _recorded, threads=1, timeout_s=120) == [0.5, 0.5]


def _in_order(_rank: int, ranks: int) -> list[str]:
    axis = Axis(size=ranks, index=dist.get_rank(), group=dist.group.WORLD)
    wrong = []
    for dim, sizes in ((0, [2, 2]), (1, [3, 3]), (1, [3, 2]), (2, [2, 2])):
        shape = [2, 3, 2]
        shape[dim] = sizes[axis.index]
        part = torch.full(shape, float(axis.index))
        found = collectives.all_gather(part, dim, sizes, axis)
        mean = torch.cat([torch.full((size,), float(i)) for i, size in enumerate(sizes)])
        right = torch.equal(found.amax([d for d in range(3) if d != dim]), mean)
        if not (right and found.is_contiguous() and found.shape[dim] == sum(sizes)):
            wrong.append(f"dim {dim}, sizes {sizes}: {tuple(found.shape)}, strides {found.stride()}")
    return wrong


def test_what_is_gathered_lies_in_the_order_of_its_dimensions() -> None:
    assert run_ranks(2, _in_order, 2, threads=1, timeout_s=120) == [[], []]
