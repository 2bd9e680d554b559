"""Measuring the machine's own ranks: real processes, real collectives, small messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from asa.errors import UsageError
from asa.ir.cluster import Cluster, Sharding
from asa.ir.codec import dumps, loads
from asa.ir.traffic import COLLECTIVE_OPS
from asa.ir.units import MIB
from asa.launch import run_ranks
from asa.profiler import collectives, interference, rounds, waiting
from asa.profiler.clock import HostClock
from asa.profiler.collectives import measure_tables, message_within, operation
from asa.profiler.interconnect import measure_cluster
from asa.profiler.rounds import agree, slowest, time_together
from asa.sharding.collectives import direct


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    said: list[float] = []
    with pytest.MonkeyPatch.context() as patch:  # work and stretches of it a tenth as long
        patch.setattr(interference, "_PASS_BYTES", 3 * MIB)
        patch.setattr(interference, "_MATRIX", 256)
        patch.setattr(waiting, "_MEETINGS", {1: 9, 3: 6, 6: 3})
        patch.setattr(waiting, "_ALONE", 6)
        patch.setattr(waiting, "_LARGE", 256)
        patch.setattr(waiting, "_LONG_S", 1e9)  # a machine that stops for a moment leaves no stretch out
        found = measure_cluster(
            3, sizes=(256, 6000), time_limit_s=1.0, progress=lambda fraction, _: said.append(fraction)
        )
    assert said[0] == 0.0
    assert said[-1] == 1.0
    assert said == sorted(said)
    return found


def test_every_collective_is_measured_on_every_group_size(cluster):
    (level,) = cluster.levels
    expected = {(op, n) for op in COLLECTIVE_OPS for n in (2, 3) if op != "send_recv" or n == 2}
    assert {(t.op, t.ranks) for t in level.tables} == expected
    assert level.devices == cluster.num_devices == 3
    assert all(t.status == "measured" and "asa cluster measure" in t.source for t in level.tables)


def test_sizes_are_whole_messages_that_every_rank_has_an_equal_part_of(cluster):
    for table in cluster.levels[0].tables:
        assert [b for b, _ in table.points] == ([256, 6000] if table.ranks == 2 else [252, 6000])
        assert all(b % (4 * table.ranks) == 0 for b, _ in table.points)


def test_contention_covers_all_counts_and_speeds_nothing_up(cluster):
    assert [c.ranks for c in cluster.contention] == [1, 2, 3]
    assert cluster.contention[0].slowdown == 1.0
    assert all(c.slowdown >= 1 for c in cluster.contention)
    assert cluster.overlap.saving <= 1


def test_meeting_and_sharding_take_time_or_none(cluster):
    assert [w.ranks for w in cluster.waiting] == [2, 3]
    for found in cluster.waiting:
        factors = [f for _, f in found.points]
        assert factors == sorted(factors, reverse=True)
        assert factors[-1] >= 1
        one, every = (s for s, _ in found.points[:2])
        assert every == pytest.approx(3 * one)  # a single kernel, and each of the three
    costs = astuple(cluster.sharding)
    assert min(costs) >= 0  # each is a difference of times, and may be too little to see on busy cores


UNIT_S, TENSOR_S, BYTE_S, UPDATE_S = 0.25, 0.125, 2.0**-20, 0.5


def _sharding_by_told_times(_rank: int) -> Sharding:
    """What is made of steps that take longer sharded than whole: by so much for a unit, for a tensor and for a byte."""
    group, updates = dist.new_group([0, 1]), []

    def told(work: Callable[[], object], _clock: HostClock, **_: Any) -> float:
        work()
        names = inspect.getclosurevars(work).nonlocals if inspect.isfunction(work) else {}
        if "gather" in names:
            return 0.5  # the messages of a unit
        if "model" not in names:  # steps of optimizers, by turns over whole tensors and over parts
            updates.append(work)
            return 1.0 if len(updates) % 2 else 1.0 + waiting._UNITS * UPDATE_S
        if not isinstance(names["model"], FSDPModule):
            return 1.0
        sizes = [p.numel() for p in names["model"].parameters()]
        more = UNIT_S + TENSOR_S * len(sizes) / waiting._UNITS + 4 * BYTE_S * (sizes[0] - waiting._SMALL**2)
        return 1.0 + waiting._UNITS * (0.5 + 3 * more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_LARGE", 256)
        patch.setattr(waiting, "time_together", told)
        return waiting.measure_sharding(torch.device("cpu"), HostClock(), group, slice_s=0.01)


def test_what_sharding_costs_is_told_by_unit_by_tensor_and_by_byte():
    for found in run_ranks(2, _sharding_by_told_times, threads=1, limit_s=240):
        assert found.unit_s == pytest.approx(UNIT_S)
        assert found.moved_tensor_s == pytest.approx(TENSOR_S)
        assert found.byte_s == pytest.approx(BYTE_S)
        assert found.tensor_s == pytest.approx(UPDATE_S)


def test_the_device_is_this_machine(cluster):
    assert cluster.device.type == "cpu"
    assert cluster.device.memory_bytes > 0
    assert min(cluster.device.peak_fp32_flops, cluster.device.memory_bandwidth) > 1e6


def test_a_measured_cluster_is_a_file(cluster):
    assert loads(Cluster, dumps(cluster), source="test") == cluster


def test_one_rank_has_nobody_to_talk_to():
    cluster = measure_cluster(1, time_limit_s=0.2, name="alone")
    assert cluster.name == "alone"
    assert cluster.levels == ()
    assert [c.ranks for c in cluster.contention] == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_ranks": 0},
        {"num_ranks": 2, "sizes": ()},
        {"num_ranks": 2, "sizes": (8,)},
        {"num_ranks": 2, "time_limit_s": 0},
    ],
)
def test_impossible_requests_are_refused_before_any_rank_starts(wrong):
    with pytest.raises(UsageError):
        measure_cluster(**wrong)


def _collectives_on_a_rank(rank: int) -> dict[str, float]:
    """What is left in a rank's buffers after each operation ran once on distinct values."""
    group = dist.new_group([0, 1])
    found = {}
    for op in COLLECTIVE_OPS:
        work = operation(op, 3, group, torch.device("cpu"))
        buffers = {c.cell_contents for c in work.__closure__ if isinstance(c.cell_contents, torch.Tensor)}
        for buffer in buffers:
            buffer.fill_(rank + 1.0)
        work()
        found[op] = sum(float(buffer.sum()) for buffer in buffers)
    return found


def test_operations_really_communicate():
    first, second = run_ranks(2, _collectives_on_a_rank, threads=1, limit_s=240)
    whole, part = 6, 3
    assert first["all_reduce"] == second["all_reduce"] == 3.0 * whole
    assert first["all_gather"] == 9.0 + 1.0 * part
    assert second["reduce_scatter"] == 3.0 * part + 2.0 * whole
    assert first["all_to_all"] == 9.0 + 1.0 * whole
    assert second["broadcast"] == 1.0 * whole
    assert second["send_recv"] == 1.0 * whole


def _agreement_on_a_rank(rank: int) -> tuple[list[float], float, float]:
    calls: list[int] = []
    seconds = time_together(lambda: calls.append(1), HostClock(), slice_s=0.01)
    counts = agree(float(len(calls)), -float(len(calls)))
    return counts, slowest([1.0, 5.0, 2.0] if rank else [3.0, 1.0, 1.0]), seconds


def test_the_slowest_rank_counts_and_all_repeat_equally_often():
    for counts, median, seconds in run_ranks(2, _agreement_on_a_rank, threads=1, limit_s=240):
        assert counts[0] == -counts[1] > 0
        assert median == 3.0
        assert seconds > 0


class _Told(HostClock):
    """A clock that moves only when it is told to. The module ``time`` reads the same in the code under test."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def mark(self) -> int:
        return round(self.now_s * 1e9)

    def takes(self, seconds: float, work: Callable[..., object]) -> Callable[..., object]:
        """``work``, for ``seconds`` on this clock. 0 stands for what its longest message takes at 30 MB/s."""

        def sent(*tensors: torch.Tensor, **options: Any) -> object:
            self.now_s += seconds or 4 * max(t.numel() for t in tensors) / 3e7
            return work(*tensors, **options)

        return sent


def _over_slow_links(rank: int) -> tuple[list[int], dict[str, int]]:
    """What is sent over links of 30 MB/s: messages that fit into some times, and the longest of every table."""
    group, device, clock = dist.new_group([0, 1]), torch.device("cpu"), _Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "time", clock)
        patch.setattr(collectives, "time", clock)
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(direct, name, clock.takes(0, getattr(direct, name)))
        for name, module in (("broadcast", direct), ("all_to_all_single", dist), ("send", dist)):
            patch.setattr(module, name, clock.takes(0.015, getattr(module, name)))
        if rank:
            clock.now_s += 5.0  # clocks of two machines differ
        within = [message_within(1 << 24, group, device, clock, seconds=s) for s in (0.02, 1 / 3, 1e-9)]
        tables = measure_tables(
            group, device, clock, sizes=[4**k for k in range(6, 12)], slice_s=1.0, source="a test",
            report=lambda *_: None, between=lambda: clock.takes(1 / 6, lambda: None)(),
        )  # fmt: skip
    return within, {t.op: t.points[-1][0] for t in tables}


def test_messages_are_as_long_as_the_links_allow():
    (within, longest), other = run_ranks(2, _over_slow_links, threads=1, limit_s=240)
    assert (within, longest) == other, "or a rank waits for what the other does not send"
    assert within == [1 << 18, 1 << 22, 1 << 16]
    assert longest["all_reduce"] < 1 << 22, "which takes 0.13 s, and five of them more than there is"
    assert min(longest[op] for op in ("broadcast", "send_recv")) == 1 << 22, "what the others took is not their loss"
