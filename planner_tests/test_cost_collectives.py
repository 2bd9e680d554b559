"""Laws of collective times: tables are honoured, gaps filled by bandwidth, no group invented faster than seen."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost.machine import presets
from asa.cost.traffic.collectives import Links, carried, interpolate
from asa.errors import InvalidInputError
from asa.ir.cluster import Cluster, CollectiveTable, Contention, Device, Level, Overlap
from asa.ir.traffic import COLLECTIVE_OPS, Collective

MIB = 2**20
DEVICE = Device(name="d", type="cuda", memory_bytes=2**34)


def table(ranks: int, points: dict[int, float], op: str = "all_reduce") -> CollectiveTable:
    found = tuple(sorted(points.items()))
    return CollectiveTable(op=op, ranks=ranks, points=found, status="measured", source="a test")


def seconds(some: Cluster, collective: Collective) -> float:
    return Links(some).seconds(collective)


def cluster(*levels: Level) -> Cluster:
    return Cluster(
        name="c",
        backend="nccl",
        device=DEVICE,
        num_devices=levels[-1].devices,
        levels=levels,
        contention=(Contention(ranks=1, slowdown=1.0),),
        overlap=Overlap(),
        status="measured",
        source="a test",
    )


def flat(*tables: CollectiveTable, devices: int = 8) -> Cluster:
    return cluster(Level(name="l", devices=devices, tables=tables))


def collective(op: str, size: float, ranks: int, stride: int = 1) -> Collective:
    return Collective(op=op, phase="forward", bytes=size, ranks=ranks, stride=stride)


points_strategy = st.dictionaries(
    st.integers(1, 2**30), st.floats(1e-6, 10, allow_nan=False), min_size=1, max_size=8
).map(lambda d: tuple((float(k), v) for k, v in sorted(d.items())))


@given(points_strategy)
def test_points_are_read_back_exactly(points):
    for size, time in points:
        assert interpolate(points, size) == pytest.approx(time, rel=1e-9)


@given(points_strategy, st.floats(1, 2**33))
def test_between_points_lies_between_their_times(points, size):
    found = interpolate(points, size)
    if size <= points[0][0]:
        assert found == points[0][1]
    elif size >= points[-1][0]:
        assert found == pytest.approx(points[-1][1] * size / points[-1][0])
    else:
        near = next((a, b) for a, b in pairwise(points) if a[0] <= size <= b[0])
        assert min(t for _, t in near) * (1 - 1e-9) <= found <= max(t for _, t in near) * (1 + 1e-9)


def test_interpolation_is_straight_in_logarithms():
    points = ((1024.0, 1e-4), (1024.0 * 64, 64e-4))
    assert interpolate(points, 1024 * 8) == pytest.approx(8e-4)


def test_a_small_message_never_takes_longer_than_a_larger_one():
    c = flat(table(8, {32768: 6e-3, MIB: 4e-4, 64 * MIB: 1e-2}))
    assert seconds(c, collective("all_reduce", 1000, 8)) == pytest.approx(4e-4)


def test_groups_of_one_and_empty_messages_are_free():
    c = flat(table(8, {MIB: 1e-3}))
    assert seconds(c, collective("all_reduce", 1e9, 1)) == 0
    assert seconds(c, collective("all_reduce", 0, 8)) == 0


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_missing_operation_has_the_bus_bandwidth_of_the_one_that_is_there(op):
    c = flat(table(8, {MIB: 1e-3, 64 * MIB: 2e-2}))
    assert seconds(c, collective(op, 64 * MIB, 8)) == pytest.approx(1e-2)
    ring = seconds(c, collective("all_gather", MIB, 8)) + seconds(c, collective("reduce_scatter", MIB, 8))
    assert ring == pytest.approx(seconds(c, collective("all_reduce", MIB, 8)))


def test_a_group_size_between_two_measured_ones_has_a_rate_between_theirs():
    c = flat(table(2, {64 * MIB: 1e-2}), table(8, {64 * MIB: 7e-2}))
    rates = [seconds(c, collective("all_reduce", 64 * MIB, n)) / carried("all_reduce", n) for n in (2, 4, 8)]
    # 4 of 8 ranks: never faster than all 8 together, for others work beside them.
    assert rates[0] <= rates[1] <= rates[2] * (1 + 1e-9)


def test_side_by_side_groups_share_what_a_crowd_gets_on_a_shared_bus():
    shared = flat(table(2, {64 * MIB: 1e-2}), table(8, {64 * MIB: 1.75 * 5e-2}))
    alone = Links(shared, width=2).seconds(collective("all_reduce", 64 * MIB, 2))
    beside = Links(shared, width=8).seconds(collective("all_reduce", 64 * MIB, 2))
    assert alone == pytest.approx(1e-2)
    assert beside == pytest.approx(5e-2)
    switched = flat(table(2, {64 * MIB: 1e-2}), table(8, {64 * MIB: 1.75 * 1e-2}))
    assert Links(switched, width=8).seconds(collective("all_reduce", 64 * MIB, 2)) == pytest.approx(1e-2)


def test_levels_are_crossed_only_where_the_group_does():
    inner = Level(name="in", devices=4, tables=(table(4, {MIB: 1e-4}), table(2, {MIB: 1e-4})))
    outer = Level(name="out", devices=8, tables=(table(8, {MIB: 1e-1}), table(2, {MIB: 1e-1})))
    c = cluster(inner, outer)
    assert seconds(c, collective("all_reduce", MIB, 4)) == pytest.approx(1e-4)
    assert seconds(c, collective("all_reduce", MIB, 8)) == pytest.approx(1e-1)
    assert seconds(c, collective("all_reduce", MIB, 2, stride=2)) == pytest.approx(1e-4)
    # Four strided pairs leave each block of four at once.
    assert seconds(c, collective("all_reduce", MIB, 2, stride=4)) == pytest.approx(4e-1)


def test_a_level_without_tables_is_priced_by_a_wider_one():
    c = cluster(Level(name="in", devices=4, tables=()), Level(name="out", devices=8, tables=(table(8, {MIB: 1e-1}),)))
    assert seconds(c, collective("all_reduce", MIB, 4)) > 0


def test_a_level_without_tables_is_not_taken_for_a_narrower_one():
    c = cluster(Level(name="in", devices=4, tables=(table(4, {MIB: 1e-4}),)), Level(name="out", devices=8, tables=()))
    assert seconds(c, collective("all_reduce", MIB, 4)) == pytest.approx(1e-4)
    with pytest.raises(InvalidInputError, match="among 8 ranks; level 'out', which joins them, needs one"):
        seconds(c, collective("all_reduce", MIB, 8))


def test_a_cluster_without_any_table_says_so():
    with pytest.raises(InvalidInputError, match="no table"):
        seconds(cluster(Level(name="l", devices=2, tables=())), collective("all_reduce", MIB, 2))


@given(
    st.sampled_from(presets.names()),
    st.sampled_from(COLLECTIVE_OPS),
    st.floats(1, 2**32),
    st.floats(1, 2**32),
    st.integers(2, 8),
)
def test_more_bytes_never_take_less_time(name, op, a, b, ranks):
    c = presets.load(name)
    ranks = min(ranks, c.num_devices)
    small, large = sorted((a, b))
    found = [seconds(c, collective(op, s, ranks)) for s in (small, large)]
    assert 0 < found[0] <= found[1] * (1 + 1e-12) < math.inf


def test_five_v100s_are_slower_than_four():
    v100 = presets.load("v100-dgx1-8")
    times = {n: seconds(v100, collective("all_reduce", 100 * MIB, n)) for n in range(2, 9)}
    assert times[5] > 1.5 * times[4]
    assert times[8] < times[5]
