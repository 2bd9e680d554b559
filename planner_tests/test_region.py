"""What travels when a tensor's parts are dealt out anew: every element once, from somebody who has it."""

from __future__ import annotations

import random
from itertools import product

import pytest

from asa.ir.layout import bounds
from asa.ir.region import Region, Run, everything, extent, narrowed, places, size, transfers


def _elements(region: Region) -> list[tuple[int, ...]]:
    return list(product(*([i for start, stop in runs for i in range(start, stop)] for runs in region)))


def _some_region(random_: random.Random, shape: tuple[int, ...]) -> Region:
    """A shard of one dimension in blocks, and of it a shard of the first dimension; perhaps nothing at all."""
    region = [list(runs) for runs in everything(shape)]
    dim, blocks = random_.randrange(len(shape)), random_.choice([1, 1, 3])
    if shape[dim] % blocks == 0 and random_.random() < 0.7:
        run, parts = shape[dim] // blocks, random_.randint(1, 4)
        start, stop = bounds(run, parts, random_.randrange(parts))
        region[dim] = [(b * run + start, b * run + stop) for b in range(blocks) if stop > start]
    rows = sum(stop - start for start, stop in region[0])
    parts = random_.randint(1, 4)
    chunk = -(-rows // parts)
    i = random_.randrange(parts)
    region[0] = list(narrowed(region[0], min(rows, i * chunk), min(rows, (i + 1) * chunk)))
    return tuple(tuple(runs) for runs in region)


@pytest.mark.parametrize("seed", range(60))
def test_every_element_comes_once_from_a_rank_that_has_it(seed: int) -> None:
    random_ = random.Random(seed)
    shape = tuple(random_.choice([1, 3, 6, 7, 12]) for _ in range(random_.randint(1, 3)))
    held = {rank: _some_region(random_, shape) for rank in range(4)} | {4: everything(shape)}
    wanted = {rank: _some_region(random_, shape) for rank in (1, 2, 4, 6)}
    sent = dict.fromkeys(held, 0)
    found = transfers(held, wanted, sent, 8)
    for rank, region in wanted.items():
        came = [e for _, target, box in found if target == rank for e in product(*(range(*run) for run in box))]
        assert sorted(came) == sorted(_elements(region))
        mine = set(_elements(held.get(rank, ((),) * len(shape))))
        local = {e for s, t, box in found if s == t == rank for e in product(*(range(*run) for run in box))}
        assert local == mine & set(came), "what a rank has it takes from itself"
    for source, target, box in found:
        assert set(product(*(range(*run) for run in box))) <= set(_elements(held[source]))
        for region in (held[source], wanted[target]):
            there = [tuple(p) for p in product(*(range(*run) for run in places(region, box)))]
            order = {e: i for i, e in enumerate(_elements(region))}
            flat = list(product(*(range(n) for n in extent(region))))
            assert [order[e] for e in product(*(range(*run) for run in box))] == [flat.index(p) for p in there]
    assert sum(sent.values()) == 8 * sum(size(box) for s, t, box in found if s != t)


def test_copies_share_the_sending() -> None:
    """Three ranks hold everything, one gets three tensors: each sends one."""
    whole: Region = (((0, 6),),)
    sent = dict.fromkeys(range(3), 0)
    sources = [transfers(dict.fromkeys(range(3), whole), {3: whole}, sent)[0][0] for _ in range(3)]
    assert sorted(sources) == [0, 1, 2]


def test_what_nobody_holds_is_said() -> None:
    with pytest.raises(ValueError, match=r"no rank holds \[\(2, 3\)\]"):
        transfers({0: (((0, 2),),)}, {1: (((0, 3),),)}, {0: 0})
    with pytest.raises(ValueError, match="not in one run"):
        places((((0, 2), (4, 6)),), ((1, 5),))


def test_a_tensor_without_dimensions_travels_too() -> None:
    runs: tuple[Run, ...] = ()
    assert transfers({0: ()}, {1: (), 0: ()}, {0: 0}) == [(0, 1, runs), (0, 0, runs)]
    assert size(runs) == 1
