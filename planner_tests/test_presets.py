"""Presets: they load, they say how sure they are, and they are what the script makes of the public tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from asa.cost.machine import presets
from asa.cost.traffic.collectives import Links
from asa.errors import UsageError
from asa.ir import codec
from asa.ir.chips import other_gpu, same_gpu
from asa.ir.traffic import Collective

ROOT = Path(__file__).resolve().parent.parent
TRUTH = ROOT.parent / "shared" / "truth"


def test_there_are_many_and_all_load():
    names = presets.names()
    assert len(names) >= 8
    assert {"a100-nvlink-8", "v100-dgx1-8", "h100-nvlink-8", "3090-pcie-8"} <= set(names)
    for name in names:
        cluster = presets.load(name)
        assert cluster.name == name
        assert cluster.source
        assert all(t.source for level in cluster.levels for t in level.tables)


def test_what_was_not_measured_is_not_called_measured():
    for name in presets.names():
        for level in presets.load(name).levels:
            for table in level.tables:
                if "estimated" in table.source:
                    assert table.status != "measured", (name, table.ranks)


def test_every_group_of_every_preset_has_a_price():
    for name in presets.names():
        cluster = presets.load(name)
        links = Links(cluster)
        for ranks in range(2, cluster.num_devices + 1):
            assert links.seconds(Collective(op="all_gather", phase="forward", bytes=1e6, ranks=ranks)) > 0


def test_an_unknown_name_gets_near_ones():
    with pytest.raises(UsageError, match="a100-nvlink-8"):
        presets.load("a100-nvlink")


@pytest.mark.skipif(not TRUTH.is_dir(), reason="the public tables (../shared/truth) are not here")
def test_the_committed_files_are_what_the_script_makes():
    spec = importlib.util.spec_from_file_location("make_presets", ROOT / "benchmarks" / "make_presets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_presets"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    made = module.presets(json.loads((TRUTH / "interconnects.json").read_text()))
    assert sorted(c.name for c in made) == presets.names()
    for cluster in made:
        assert codec.fingerprint(cluster) == codec.fingerprint(presets.load(cluster.name)), cluster.name


def test_a_card_of_every_preset_is_known_by_its_name():
    for name in presets.names():
        own = presets.load(name).device.name
        assert same_gpu(own, own)
        assert same_gpu(own, own.removeprefix("NVIDIA ")), own
    assert not any(same_gpu("NVIDIA GeForce RTX 4090 Laptop GPU", presets.load(n).device.name) for n in presets.names())
    assert other_gpu("NVIDIA A100-SXM4-40GB", presets.load("t4-pcie-4").device.name)
    assert not other_gpu("NVIDIA A100-PCIE-40GB", presets.load("a100-nvlink-8").device.name)
    assert not other_gpu("a card of ours", presets.load("t4-pcie-4").device.name)
