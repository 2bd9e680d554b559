"""Clusters with more nodes than are known of them."""

from __future__ import annotations

import pytest

from asa.cost.machine import presets, widen
from asa.cost.traffic.collectives import Links
from asa.errors import UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster


def test_more_nodes_are_of_the_same_kind() -> None:
    known = presets.load("h100-4x8-ib")
    wide = widen.widened(known, 64)
    assert (wide.num_devices, wide.node, wide.name, wide.status) == (64, 8, "h100-4x8-ib-as-8x8", "derived")
    assert wide.device == known.device
    assert "4 nodes of 8 x NVIDIA H100" in wide.source
    assert codec.fingerprint(widen.widened(known, 64)) == codec.fingerprint(wide)
    assert codec.loads(Cluster, codec.dumps(wide), source="itself") == wide
    assert widen.widened(known, 33).num_devices == 40  # whole nodes


@pytest.mark.parametrize(
    "name", [n for n in presets.names() if len(presets.load(n).levels) > 1 and not presets.load(n).devices]
)
def test_inside_what_is_known_nothing_changes_and_more_nodes_take_no_less(name: str) -> None:
    known = presets.load(name)
    wide = widen.widened(known, 4 * known.num_devices)
    for ranks, stride in ((2, 1), (known.node, 1), (known.num_devices // known.node, known.node)):
        if ranks > 1:
            was, now = (Links(c, known.num_devices).time("all_reduce", 1e8, ranks, stride) for c in (known, wide))
            assert now == pytest.approx(was, rel=1e-12)
    small = Links(wide, known.num_devices).time("all_reduce", 1e8, known.num_devices, 1)
    assert Links(wide).time("all_reduce", 1e8, wide.num_devices, 1) >= small


@pytest.mark.parametrize(("name", "ranks"), [("h100-nvlink-8", 16), ("h100-4x8-ib", 10**6)])
def test_what_nobody_knows_is_refused(name: str, ranks: int) -> None:
    assert not widen.possible(presets.load(name), ranks)
    with pytest.raises(UsageError, match="cannot be derived"):
        widen.widened(presets.load(name), ranks)
