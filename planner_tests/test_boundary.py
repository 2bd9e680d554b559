"""Boundaries between layouts: exact in both directions, for every pair of degrees."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asa.executor.model.groups import Groups
from asa.ir.layout import Boundary, Layout, bounds, gather_group, gather_groups
from asa.launch import run_ranks
from asa.sharding.collectives.axis import SOLO
from asa.sharding.collectives.boundary import Crossing
from planner_tests.test_strategy_contract import Recorder


def layouts(width: int) -> list[Layout]:
    return [
        Layout(width=width, data=d, tensor=t)
        for d in range(1, width + 1)
        for t in range(1, width + 1)
        if width % (d * t) == 0
    ]


@given(total=st.integers(0, 500), fine=st.integers(1, 12), factor=st.integers(1, 6))
def test_bounds_partition_and_nest(total: int, fine: int, factor: int) -> None:
    edges = [bounds(total, fine * factor, i) for i in range(fine * factor)]
    assert [e for pair in edges for e in pair][1:-1:2] == [stop for _, stop in edges][:-1]
    assert (edges[0][0], edges[-1][1]) == (0, total)
    assert max(b - a for a, b in edges) - min(b - a for a, b in edges) <= 1
    coarse = {bounds(total, fine, i)[0] for i in range(fine)}
    assert coarse <= {start for start, _ in edges}


@given(width=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), data=st.data())
def test_groups_partition_the_stage(width: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(layouts(width)))
    for groups in (layout.data_groups(), layout.tensor_groups()):
        assert sorted(r for g in groups for r in g) == list(range(width))
    for rank in range(width):
        assert layout.data_group(rank)[layout.data_index(rank)] == rank
        assert layout.tensor_group(rank)[layout.tensor_index(rank)] == rank
    divisors = [d for d in range(1, layout.data + 1) if layout.data % d == 0]
    coarse = data.draw(st.sampled_from(divisors))
    for rank in range(width):
        group = gather_group(width, layout.data, coarse, rank)
        assert rank in group
        shards = [layout.data_index(r) for r in group]
        per = layout.data // coarse
        assert shards == list(range(shards[0] // per * per, shards[0] // per * per + per))


def _cross_all(rank: int, width: int, total: int) -> list[str]:
    """Cross every pair of layouts, with whole values and with addends of them; return complaints."""
    torch.manual_seed(0)
    whole = torch.randn(total, 3, dtype=torch.float64)
    slopes = torch.randn(total, 3, dtype=torch.float64)
    complaints = []
    pairs = list(itertools.product(layouts(width), layouts(width)))
    wanted = []
    for source, target in pairs:
        meeting = Boundary(source=source, target=target).meeting
        for end in (source, target):
            wanted += [("activation", g) for g in end.tensor_groups()]
            wanted += [("activation", g) for g in gather_groups(width, end.data, meeting)]
    groups = Groups(rank, [g for g in dict.fromkeys(wanted) if len(g[1]) > 1])
    axis = lambda ranks: SOLO if len(ranks) == 1 else groups.axis("activation", ranks)  # noqa: E731
    for (source, target), partial in itertools.product(pairs, (False, True)):
        boundary = Boundary(source=source, target=target, exit_partial=partial, entry_partial=partial)
        crossing = Crossing.build(boundary, rank, axis)
        here, there = (bounds(total, e.data, e.data_index(rank)) for e in (source, target))
        share = 1.0
        if partial and source.tensor > 1:  # unequal addends that sum to one
            share = (source.tensor_index(rank) + 1) * 2 / (source.tensor * (source.tensor + 1))
        x = (whole[slice(*here)] * share).requires_grad_()
        y = crossing(x, total)
        if not torch.allclose(y, whole[slice(*there)], atol=1e-12):
            complaints.append(f"forward {source} -> {target}, {partial=}")
        gradient = slopes[slice(*there)] * target.data
        if partial and target.tensor > 1:
            gradient = gradient * (target.tensor_index(rank) + 1) * 2 / (target.tensor * (target.tensor + 1))
        y.backward(gradient)
        assert x.grad is not None
        if not torch.allclose(x.grad, slopes[slice(*here)] * source.data, atol=1e-12):
            complaints.append(f"backward {source} -> {target}, {partial=}")
    groups.close()
    return complaints


@pytest.mark.parametrize(("width", "total"), [(2, 8), (2, 7), (3, 7), (4, 8), (4, 10), (6, 13)])
def test_every_crossing_is_exact(width: int, total: int) -> None:
    assert run_ranks(width, _cross_all, width, total, threads=1, timeout_s=120) == [[]] * width


def by_tokens(width: int) -> list[Layout]:
    """Every layout, and again with its tokens cut."""
    return [*layouts(width), *(replace(x, sequence=True) for x in layouts(width) if x.tensor > 1)]


def _cross_tokens(rank: int, width: int, total: int, tokens: int) -> list[str]:
    """Cross every pair of layouts of which one cuts tokens, and compare bytes; return complaints."""
    torch.manual_seed(0)
    whole = torch.randn(total, tokens, 3, dtype=torch.float64)
    slopes = torch.randn(total, tokens, 3, dtype=torch.float64)
    every = by_tokens(width)
    pairs = [(a, b) for a, b in itertools.product(every, every) if a.sequence or b.sequence]
    wanted = []
    for source, target in pairs:
        for end in (source, target):
            wanted += [("activation", g) for g in end.tensor_groups()]
            wanted += [("activation", g) for g in gather_groups(width, end.data, gcd(source.data, target.data))]
    groups = Groups(rank, [g for g in dict.fromkeys(wanted) if len(g[1]) > 1])
    axis = lambda ranks: SOLO if len(ranks) == 1 else groups.axis("activation", ranks)  # noqa: E731

    def part(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = x[slice(*bounds(total, layout.data, layout.data_index(rank)))]
        return x[:, slice(*bounds(tokens, layout.tensor, layout.tensor_index(rank)))] if layout.sequence else x

    complaints = []
    for source, target in pairs:
        boundary = Boundary(source=source, target=target, exit_tokens=tokens, entry_tokens=tokens)
        x = part(whole, source).clone().requires_grad_()
        recorder = Recorder()
        with recorder:
            y = Crossing.build(boundary, rank, axis)(x, total)
            (y * part(slopes, target) * target.data).sum().backward()
        if not torch.equal(y, part(whole, target)):
            complaints.append(f"forward {source} -> {target}")
        assert x.grad is not None
        if not torch.allclose(x.grad, part(slopes, source) * source.data, atol=1e-12):
            complaints.append(f"backward {source} -> {target}")
        said = sum(round(c.bytes) for c in boundary.traffic(whole.nbytes))
        if total % width == 0 and sum(recorder.seen.values()) != said:
            complaints.append(f"bytes {source} -> {target}: {recorder.seen}, declared {said}")
    groups.close()
    return complaints


@pytest.mark.parametrize(("width", "total", "tokens"), [(2, 4, 5), (4, 8, 6), (4, 7, 9)])
def test_crossings_of_cut_tokens_are_exact(width: int, total: int, tokens: int) -> None:
    assert run_ranks(width, _cross_tokens, width, total, tokens, threads=1, timeout_s=120) == [[]] * width


def test_tokens_stay_cut_between_equal_layouts_only() -> None:
    cut = Layout(width=2, data=1, tensor=2, sequence=True)
    plain = replace(cut, sequence=False)
    alike = Boundary(source=cut, target=cut, exit_tokens=5, entry_tokens=5)
    assert alike.silent
    assert alike.traffic(5e6) == ()
    out = Boundary(source=cut, target=plain, exit_tokens=5, entry_tokens=5).traffic(5e6)
    assert [(c.op, c.phase, c.bytes) for c in out] == [("all_gather", "forward", 6e6)]
    into = Boundary(source=plain, target=cut, exit_tokens=5, entry_tokens=5).traffic(5e6)
    assert [(c.op, c.phase, c.bytes) for c in into] == [("all_gather", "backward", 6e6)]
    ends = Boundary(source=cut, target=cut, exit_tokens=0, entry_tokens=5).traffic(5e6)
    assert [(c.op, c.phase, c.bytes) for c in ends] == [("all_gather", "backward", 6e6)]
    with pytest.raises(ValueError, match="tensor group"):
        Layout(width=2, data=2, tensor=1, sequence=True)


def test_fused_boundaries_move_less() -> None:
    data, tensor = Layout(width=4, data=4, tensor=1), Layout(width=4, data=1, tensor=4)
    into = Boundary(source=data, target=tensor, entry_partial=True)
    out = Boundary(source=tensor, target=data, exit_partial=True)
    assert [c.op for c in into.traffic(1e6)] == ["all_gather", "reduce_scatter"]
    assert [c.op for c in out.traffic(1e6)] == ["reduce_scatter", "all_gather"]
    assert [c.op for c in Boundary(source=tensor, target=tensor, entry_partial=True).traffic(1e6)] == ["all_reduce"]
    assert Boundary(source=data, target=data).traffic(1e6) == ()
