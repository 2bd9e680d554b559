"""The cost model against published scaling: machines of others, profiles made from their own single-GPU rate."""

from __future__ import annotations

import csv
from pathlib import Path

import fake_strategies
import known_models
import pytest

from asa.cost.machine import presets
from asa.planner import Request, plan

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth"
pytestmark = pytest.mark.skipif(not TRUTH.is_dir(), reason="the public measurements (../shared/truth) are not here")


def rows(name: str) -> list[dict[str, str]]:
    with (TRUTH / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def rate(graph, alone: float, batch: int, cluster: str, gpus: int) -> float:
    """Samples/s of data parallelism at ``batch`` samples per GPU, where one GPU makes ``alone``."""
    profile = known_models.profile(graph, alone, batch)
    request = Request(gpus=gpus, global_batch=batch * gpus, strategies=("ddp",))
    found = plan(profile, presets.load(cluster), fake_strategies.PLAIN, request)[0]
    return found.prediction.samples_per_s


@pytest.mark.parametrize(
    ("gpu", "precision", "cluster"),
    [("V100", "fp32", "v100-dgx1-8"), ("V100", "fp16", "v100-dgx1-8"), ("A100-80G", "tf32", "a100-nvlink-8")],
)
def test_resnet50_scales_on_nvlink_as_published(gpu, precision, cluster):
    mine = [
        r for r in rows("scaling.csv")
        if r["model"] == "resnet50" and r["gpu"].startswith(gpu) and r["precision"] == precision and r["bs_per_gpu"]
    ]  # fmt: skip
    pairs = [
        (float(a["throughput"]), float(b["throughput"]), int(a["bs_per_gpu"]))
        for a in mine
        for b in mine
        if (a["n"], b["n"]) == ("1", "8") and a["source"] == b["source"]
    ]
    assert pairs, "the file has such rows"
    for alone, together, batch in pairs:
        efficiency = rate(known_models.resnet50(), alone, batch, cluster, 8) / (8 * alone)
        assert 0.90 <= efficiency <= 0.99
        assert efficiency == pytest.approx(together / (8 * alone), abs=0.05)


def pcie(model: str, batch: int) -> dict[int, float]:
    row = next(r for r in rows("scaling_pcie.csv") if (r["gpu"], r["model"], r["bs"]) == ("3090", model, str(batch)))
    return {n: float(row[f"n{n}"]) for n in (1, 2, 4, 8)}


def test_vgg16_is_not_faster_on_eight_pcie_gpus_than_on_four():
    measured = pcie("vgg16", 64)
    assert measured[8] <= measured[4], "so it was measured"
    found = {n: rate(known_models.vgg16(), measured[1], 64, "3090-pcie-8", n) for n in (4, 8)}
    assert found[8] <= found[4]


def test_resnet50_is_under_60_percent_on_eight_pcie_gpus():
    measured = pcie("resnet50", 64)
    assert measured[8] < 0.6 * 8 * measured[1], "so it was measured"
    assert rate(known_models.resnet50(), measured[1], 64, "3090-pcie-8", 8) < 0.6 * 8 * measured[1]


@pytest.mark.parametrize("batch", [64, 128, 256, 512])
def test_resnet50_on_pcie_is_predicted_within_a_fifth(batch):
    # The links of this preset were derived from VGG's times, so ResNet's are a test of it.
    measured = pcie("resnet50", batch)
    for n in (2, 4, 8):
        found = rate(known_models.resnet50(), measured[1], batch, "3090-pcie-8", n)
        assert found == pytest.approx(measured[n], rel=0.2), n
