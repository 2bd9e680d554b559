"""Collectives through memory that ranks of one host share: the stock results, and no hanging on whoever is gone."""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asa.errors import WorkersFailedError
from asa.launch import run_ranks
from asa.sharding.collectives import direct, segment
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.segment import Segment, segment_of
from asa.sharding.gradients.averaging import Averaging
from asa.sharding.gradients.replicated import Replicated

FEW_BYTES = 4096
"""A capacity at which messages take many meetings."""


def _shared(ranks: int, capacity: int = FEW_BYTES) -> Segment:
    """The default group's, whatever cores there are."""
    segment.CAPACITY_BYTES = capacity
    segment._SMALL_BYTES = 64
    segment.every_core_taken = lambda: True
    found = segment_of(None)
    assert found is not None
    assert found.ranks == ranks
    return found


def _compared(rank: int, ranks: int) -> list[str]:
    ours, wrong = _shared(ranks), []

    def check(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        most = 0.5 if found.dtype == torch.bfloat16 else 1e-4  # which order of adding rounds how
        if (found.double() - expected.double()).abs().max() > most:
            wrong.append(f"{what} of {found.numel()} {found.dtype}")

    for words in (1, 7, 1024, 1031, 20_000):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            torch.manual_seed(rank)
            x = (10 * torch.randn(words)).to(dtype)
            expected, gathered = x.clone(), x.new_empty(words * ranks)
            dist.all_reduce(expected)
            dist.all_gather_into_tensor(gathered, x)
            found = x.clone()
            ours.all_reduce(found)
            check("sum", found, expected)
            if dtype.is_floating_point:
                found = x.clone()
                ours.all_reduce(found, mean=True)
                check("mean", found, expected / ranks)
            whole, inside = x.new_empty(words * ranks), x.new_zeros(words * ranks)
            ours.all_gather(whole, x)
            check("gather", whole, gathered)
            inside[rank * words : (rank + 1) * words] = x
            ours.all_gather(inside, inside[rank * words : (rank + 1) * words])
            check("gather in place", inside, gathered)
            for source in range(ranks):
                sent = x.clone()
                ours.broadcast(sent, source)
                check("broadcast", sent, gathered[source * words : (source + 1) * words])
            part = x.new_empty(words)
            ours.reduce_scatter(part, gathered * (rank + 1))
            check("scatter", part, gathered[rank * words : (rank + 1) * words] * sum(range(1, ranks + 1)))
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_messages(ranks: int) -> None:
    assert run_ranks(ranks, _compared, ranks, threads=1, timeout_s=120) == [[]] * ranks


def _restless(rank: int, ranks: int) -> tuple[list[float], int]:
    """Many meetings of every kind at which now one rank is late, now another; the sums are known."""
    ours, draws, wrong = _shared(ranks, 512), random.Random(0), 0
    late, sums = random.Random(rank), []
    for turn in range(600):
        words = draws.choice((1, 3, 50, 400))
        x = torch.full((words,), float(turn + rank))
        if late.random() < 0.05:
            time.sleep(0.002)
        if draws.random() < 0.5:
            ours.all_reduce(x)
            wrong += not torch.equal(x, torch.full((words,), float(ranks * turn + sum(range(ranks)))))
        else:
            whole = torch.empty(words * ranks)
            ours.all_gather(whole, x)
            wrong += not torch.equal(whole.view(ranks, -1)[:, 0], torch.arange(ranks) + float(turn))
        sums.append(float(x[0]))
    return sums[-1:], wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_meeting_reads_what_belongs_to_another(ranks: int) -> None:
    assert [wrong for _, wrong in run_ranks(ranks, _restless, ranks, threads=1, timeout_s=120)] == [0] * ranks


@pytest.mark.parametrize("own", [True, False])
def test_a_short_wait_keeps_a_core_that_no_other_rank_needs(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "own_cores", lambda: own)
    clock, yielded_at = iter(range(10**6)), list[float]()
    reading = segment.SPIN_S / 10
    first = Segment(mmap.mmap(-1, segment._header(2) + 4 * segment.CAPACITY_BYTES), 2, 0, 60.0)

    def comes() -> None:
        yielded_at.append(next(clock) * reading)
        first._words[first._step] = 1

    monkeypatch.setattr(segment.time, "perf_counter", lambda: next(clock) * reading)
    monkeypatch.setattr(segment.os, "sched_yield", comes)
    first.all_reduce(torch.ones(4))
    assert len(yielded_at) == 1
    assert (yielded_at[0] > segment.SPIN_S) is own


def _same_everywhere(rank: int) -> torch.Tensor:
    ours = _shared(3)
    torch.manual_seed(rank)
    x = torch.randn(5000)
    ours.all_reduce(x)
    return x


def test_a_sum_is_the_same_to_the_bit_on_all_ranks() -> None:
    first, *others = run_ranks(3, _same_everywhere, threads=1, timeout_s=120)
    assert all(torch.equal(first, other) for other in others)


def _one_unable(rank: int) -> tuple[bool, float]:
    segment.every_core_taken = lambda: rank == 0
    x = torch.ones(4)
    direct.all_reduce(x)
    return segment_of(None) is None, float(x[0])


def test_where_one_rank_cannot_none_does() -> None:
    assert run_ranks(2, _one_unable, threads=1, timeout_s=120) == [(True, 2.0)] * 2


def _not_the_same_file(rank: int) -> bool:
    """Rank 1 is led to a file of its own, as one in a container of its own could be."""
    segment.every_core_taken = lambda: True
    if rank:
        usual = segment._opened

        def opened(path: str, size: int) -> Any:
            own = os.memfd_create("other")
            os.ftruncate(own, size)
            return usual(f"/proc/self/fd/{own}", size)

        segment._opened = opened
    return segment_of(None) is None


def test_other_memory_than_the_first_rank_s_is_noticed() -> None:
    assert run_ranks(2, _not_the_same_file, threads=1, timeout_s=120) == [True, True]


def _leaves(rank: int, how: str) -> None:
    ours = _shared(2)
    ours.all_reduce(torch.ones(1))
    if rank == 1:
        if how == "exit":
            os._exit(3)
        time.sleep(600)
    ours.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "line"), [("exit", "rank 1 of 2 exited with code 3"), ("hang", "rank 1 of 2 hung")])
def test_who_left_or_hangs_is_named(how: str, line: str) -> None:
    with pytest.raises(WorkersFailedError, match=line):
        run_ranks(2, _leaves, how, threads=1, timeout_s=5 if how == "hang" else 120)


def _averaged(rank: int) -> tuple[bool, torch.Tensor]:
    """Gradients of a replicated layer, and whether they went through shared memory."""
    segment.every_core_taken = lambda: True
    torch.manual_seed(0)
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    layer = torch.nn.Linear(3, 2)
    replica = Replicated(layer, Axis(size=2, index=rank, group=group), None)
    met = segment_of(group)
    assert met is not None
    before = met._meeting
    averaging = Averaging([replica], [])
    averaging.refresh()
    layer(torch.full((4, 3), float(rank + 1))).sum().backward()
    assert layer.weight.grad is not None
    return met._meeting > before, layer.weight.grad


def test_replicas_average_their_gradients_there() -> None:
    for through, gradient in run_ranks(2, _averaged, threads=1, timeout_s=120):
        assert through
        assert torch.equal(gradient, torch.full((2, 3), 6.0))


@pytest.mark.parametrize(
    ("ranks", "here", "cores", "taken"),
    [(2, 2, 2, True), (2, 2, 3, True), (2, 2, 4, False), (4, 4, 2, True), (2, 1, 2, False)],
)
def test_with_idle_cores_gradients_go_by_messages_beside_backward(
    monkeypatch: pytest.MonkeyPatch, ranks: int, here: int, cores: int, taken: bool
) -> None:
    monkeypatch.setattr(segment, "usable_cores", lambda: cores)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert segment.every_core_taken() is taken
