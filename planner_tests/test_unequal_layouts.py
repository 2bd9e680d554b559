"""Unequal devices: what they are in a file, and how uneven shards cut a batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import nouns
import pytest

from asa.cost.machine.widen import possible
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.layout import Boundary, Layout, bounds
from asa.ir.plan import Stage
from asa.ir.transfer import transfers
from asa.planner import Request, plan
from asa.strategies import offered
from planner_tests.test_unequal import PLAIN, unequal


def cut(layout: Layout, total: int) -> list[tuple[int, int]]:
    return [layout.rows(total, i) for i in range(layout.data)]


def test_equal_weights_cut_as_none_do():
    for width, total in itertools.product(range(1, 9), range(40)):
        for data in (d for d in range(1, width + 1) if width % d == 0):
            plain = [bounds(total, data, i) for i in range(data)]
            for given in ((), (7,) * width):
                assert cut(Layout(width=width, data=data, tensor=1, weights=given), total) == plain


def test_shards_cover_a_batch_nest_and_are_as_heavy_as_their_ranks():
    rng = random.Random(0)
    for _ in range(300):
        width, total = rng.choice([2, 3, 4, 6, 8]), rng.randrange(200)
        given = tuple(rng.randint(1, 9) for _ in range(width))
        degrees = [d for d in range(1, width + 1) if width % d == 0]
        layouts = [Layout(width=width, data=d, tensor=1, weights=given) for d in degrees]
        fine = {edge for rows in cut(layouts[-1], total) for edge in rows}
        for layout in layouts:
            rows = cut(layout, total)
            assert rows[0][0] == 0
            assert rows[-1][1] == total
            assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
            assert {edge for r in rows for edge in r} <= fine
            assert all(abs(b - a - total * layout.share(i)) < 1 for i, (a, b) in enumerate(rows))
            assert layout.fewest(total) == min(b - a for a, b in rows)
            assert all(layout.fewest(n) >= 1 for n in range(layout.least, layout.least + 30))
            assert sum(layout.share(i) for i in range(layout.data)) == pytest.approx(1)


def test_layouts_of_one_stage_have_the_same_weights():
    one = Layout(width=2, data=2, tensor=1, weights=(3, 1))
    assert Boundary(source=one, target=replace(one, data=1, tensor=2)).gathers == 2
    with pytest.raises(ValueError, match="same weights"):
        Boundary(source=one, target=Layout(width=2, data=1, tensor=2))


def test_messages_between_uneven_stages_carry_every_row_once():
    source = Layout(width=2, data=2, tensor=1, weights=(3, 1))
    target = Layout(width=3, data=3, tensor=1, weights=(2, 1, 1))
    found = transfers(source, (0, 1), target, (2, 3, 4), 8)
    assert [(m.source, m.target, m.start, m.stop) for m in found] == [(0, 2, 0, 4), (0, 3, 4, 6), (1, 4, 6, 8)]


@pytest.mark.parametrize(
    ("devices", "where"),
    [
        ((RankDevice(name="a", speed=1.0),), "$.devices"),
        ((RankDevice(name="a", speed=1.0), RankDevice(name="b", speed=0.0)), "$.devices[1].speed"),
        (
            (RankDevice(name="a", speed=1.0, memory_bytes=0), RankDevice(name="b", speed=1.0)),
            "$.devices[0].memory_bytes",
        ),
    ],
)
def test_a_cluster_says_which_device_is_wrong(devices: tuple[RankDevice, ...], where: str):
    with pytest.raises(InvalidInputError) as refused:
        replace(nouns.cluster(2), devices=devices)
    assert refused.value.where == where


def test_files_of_before_mean_what_they_meant(tmp_path):
    alike, told = nouns.cluster(2), unequal(1, 0.5)
    assert "devices" not in codec.document(alike)
    assert "weights" not in codec.document(nouns.plan())["stages"][0]
    codec.save(told, tmp_path / "c.json")
    assert codec.load(Cluster, tmp_path / "c.json") == told
    assert codec.fingerprint(told) != codec.fingerprint(alike)
    assert not possible(replace(told, devices=told.devices), 4)
    assert possible(alike, 4)


@pytest.mark.parametrize("given", [(1,), (1, 0), (1, 2**24 + 1)])
def test_weights_are_refused_that_cut_nothing(given: tuple[int, ...]):
    with pytest.raises(ValueError, match="weights"):
        Stage(ranks=(0, 1), weights=given)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_devices_that_are_equal_after_all_change_nothing(n: int):
    for strategies in (PLAIN, offered()):
        request = Request(gpus=n, global_batch=8)
        plain = plan(nouns.profile(), nouns.cluster(n), strategies, request)[0]
        told = plan(nouns.profile(), unequal(*[1] * n), strategies, request)[0]
        assert (told.components, told.stages) == (plain.components, plain.stages)
        assert told.prediction == plain.prediction
        assert told.baselines == plain.baselines
        assert told.certificate.lower_bound_s == plain.certificate.lower_bound_s
