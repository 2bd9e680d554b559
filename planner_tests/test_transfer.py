"""The law of transfers between stages: every row arrives once, from a rank that has it, and load spreads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost.traffic.handovers import sending
from asa.ir.layout import Boundary, Layout, bounds
from asa.ir.transfer import Hop, transfers, whole

WIDTHS = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], Layout, tuple[int, ...]]:
    found: list[Layout] = []
    for _ in range(2):
        width = draw(WIDTHS)
        data = draw(st.sampled_from([d for d in range(1, width + 1) if width % d == 0]))
        tensor = draw(st.sampled_from([t for t in range(1, width + 1) if width // data % t == 0]))
        found.append(Layout(width=width, data=data, tensor=tensor))
    first, second = found
    return first, tuple(range(first.width)), second, tuple(range(first.width, first.width + second.width))


@given(ends=sides(), rows=st.integers(0, 60))
def test_every_row_arrives_once_from_a_rank_that_has_it(
    ends: tuple[Layout, tuple[int, ...], Layout, tuple[int, ...]], rows: int
) -> None:
    source, source_ranks, target, target_ranks = ends
    messages = transfers(*ends, rows)
    for place, rank in enumerate(target_ranks):
        start, stop = bounds(rows, target.data, target.data_index(place))
        got = [r for m in messages if m.target == rank for r in range(m.start, m.stop)]
        assert got == list(range(start, stop))
    for m in messages:
        start, stop = bounds(rows, source.data, source.data_index(source_ranks.index(m.source)))
        assert start <= m.start < m.stop <= stop
    pairs = Counter((m.source, m.target) for m in messages)
    assert not pairs or max(pairs.values()) == 1, "one message a pair: nothing to put in order"
    sent = Counter(dict.fromkeys(source_ranks, 0))
    for m in messages:
        sent[m.source] += m.rows
    largest = max((m.rows for m in messages), default=0)
    for shard in range(source.data):
        holders = [sent[r] for r in source_ranks[shard * source.inner : (shard + 1) * source.inner]]
        assert max(holders) - min(holders) <= largest


def test_load_spreads_over_replicas() -> None:
    one, two = Layout(width=2, data=1, tensor=2), Layout(width=2, data=2, tensor=1)
    assert [(m.source, m.target, m.rows) for m in transfers(one, (0, 1), two, (2, 3), 8)] == [(0, 2, 4), (1, 3, 4)]
    assert [(m.source, m.target, m.rows) for m in transfers(two, (2, 3), one, (0, 1), 8)] == [
        (2, 0, 4), (3, 0, 4), (2, 1, 4), (3, 1, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "behind", "scale"), [(2, 1, 2.0), (1, 3, 1 / 3), (2, 2, 1.0)])
def test_a_hop_goes_both_ways(before: int, behind: int, scale: float) -> None:
    source = Layout(width=before, data=before, tensor=1)
    target = Layout(width=behind, data=behind, tensor=1)
    ranks = tuple(range(before)), tuple(range(before, before + behind))
    hop = Hop(source=source, source_ranks=ranks[0], target=target, target_ranks=ranks[1])
    assert hop.gradient_scale == scale
    there, back = hop.forward(12), hop.backward(12)
    assert sum(m.rows for m in there) == sum(m.rows for m in back) == 12
    assert {(m.source, m.target) for m in there} == {(m.target, m.source) for m in back}


def test_partial_results_stay_inside_their_stages() -> None:
    split = Layout(width=2, data=1, tensor=2)
    assert whole(split) == Layout(width=2, data=1, tensor=1)
    ends = Boundary(source=split, target=whole(split), exit_partial=True)
    begins = Boundary(source=whole(split), target=split, entry_partial=True)
    assert [c.op for c in ends.traffic(8)] == ["all_reduce"]
    assert [(c.op, c.phase) for c in begins.traffic(8)] == [("all_reduce", "backward")]
    for complete in (replace(ends, exit_partial=False), replace(begins, entry_partial=False)):
        assert complete.traffic(8) == ()


@given(ends=sides(), rows=st.integers(0, 60), sizes=st.tuples(st.floats(0, 3), st.floats(0, 3)))
def test_the_busiest_rank_is_among_those_that_are_priced(
    ends: tuple[Layout, tuple[int, ...], Layout, tuple[int, ...]], rows: int, sizes: tuple[float, float]
) -> None:
    every: dict[int, list[int]] = {}
    for m in transfers(*ends, rows):
        for rank in (m.source, m.target):
            every.setdefault(rank, []).append(m.rows)
    latency, each = sizes

    def taken(messages: Iterable[int]) -> float:
        return sum(latency + each * r for r in sorted(messages))

    flows, busiest = sending(whole(ends[0]), whole(ends[2]), rows)
    assert max(map(taken, busiest), default=0.0) == max(map(taken, every.values()), default=0.0)
    assert (flows == 0) == (not every)
