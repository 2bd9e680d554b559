"""Plans for devices that are elsewhere, of models that were never measured: traced once."""

from __future__ import annotations

import json
from dataclasses import replace

import nouns
import pytest

from asa.cli import choose, entry, estimates
from asa.cost.machine import presets
from asa.cost.machine.nearest import nearest
from asa.ir import codec
from asa.ir.profile import DeviceRecord, Profile

PLAN = ("plan", "--cluster", "a100-nvlink-8", "--time-limit", "0.3s", "--json")


@pytest.fixture
def traced(tmp_path, monkeypatch) -> list[str]:
    """An empty directory on a machine without GPUs, and the models that are traced in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "cuda_devices", lambda: 0)
    real, seen = estimates._traced, []

    def counted(model, args):
        seen.append(model)
        return real(model, args)

    monkeypatch.setattr(estimates, "_traced", counted)
    return seen


def test_a_model_is_traced_once_whatever_is_asked_of_it(traced, tmp_path, capsys):
    def planned(*words: str) -> dict[str, object]:
        assert entry.run([*PLAN, *words]) == 0, words
        return json.loads(capsys.readouterr().out)

    first = planned("logistic", "--gpus", "2", "-o", "first.json")
    again = planned("logistic", "--gpus", "2")
    assert (first["components"], first["prediction"]) == (again["components"], again["prediction"])
    planned("logistic", "--gpus", "4", "--global-batch", "64")
    assert traced == ["logistic"]
    planned("logistic", "--gpus", "4", "--precision", "bf16")  # activations of another type
    planned("logistic", "--gpus", "2", "--precision", "bf16")
    assert traced == ["logistic", "logistic"]
    planned("logistic", "--classes", "7")
    assert traced == ["logistic"] * 3, "another model"
    assert entry.run(["explain", "first.json"]) == 0, "its estimate is still there"


def test_code_of_the_users_own_is_traced_each_time(traced, tmp_path, capsys):
    (tmp_path / "own_estimated.py").write_text(
        "from torch import nn\n\n\ndef net(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))\n"
    )
    for _ in range(2):
        assert entry.run([*PLAN, "own_estimated:net", "--gpus", "2"]) == 0
    assert traced == ["own_estimated:net"] * 2


def test_what_was_kept_for_a_model_and_cannot_be_read_is_traced_again(traced, tmp_path, capsys):
    assert entry.run([*PLAN, "logistic", "--gpus", "2"]) == 0
    for path in tmp_path.glob("runs/estimates/*.json"):
        path.write_text(path.read_text()[:100])
    assert entry.run([*PLAN, "logistic", "--gpus", "2"]) == 0
    assert traced == ["logistic"] * 2


def test_batch_norm_is_given_one_sample_where_it_was_seen_to_train_on_one(traced, tmp_path, capsys):
    (tmp_path / "own_normed.py").write_text(
        "from torch import nn\n\n\ndef net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "        nn.Linear(8, num_classes))\n\n\ndef shrunk(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 32), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, num_classes))\n"
    )

    def why_not(model: str, *words: str) -> str:
        assert entry.run([*PLAN, model, "--gpus", "4", "--global-batch", "4", *words]) == 0
        baselines = json.loads(capsys.readouterr().out)["baselines"]
        return next(b["why_not"] for b in baselines if b["name"] == "ddp")

    assert why_not("own_normed:net") == "", "an image has 900 values a channel"
    assert "needs 2 samples for BatchNorm per rank, gets 1" in why_not("own_normed:shrunk")
    assert "needs 2 samples for BatchNorm per rank, gets 1" in why_not("resnet18")
    assert "needs 2 samples for BatchNorm per rank, gets 1" in why_not("resnet18"), "as remembered"
    assert why_not("resnet18", "--input", "3x64x64") == ""


def test_an_estimate_names_the_inputs_it_is_for(traced, capsys):
    assert entry.run([*PLAN, "logistic", "--gpus", "2", "--input", "3x64x64"]) == 0
    assert "(inputs of 3x64x64)" in capsys.readouterr().err


def measured(name: str, **changes: object) -> Profile:
    """A profile of ``tiny``, measured on the GPU ``name``."""
    made = nouns.profile()
    return replace(made, device=DeviceRecord(type="cuda", name=name, memory_bytes=2**34, threads=1), **changes)


def test_times_of_one_gpu_are_not_taken_for_those_of_another(traced, tmp_path, capsys):
    codec.save(measured("NVIDIA A100-SXM4-40GB"), tmp_path / "profiles" / "tiny.json")

    def planned(cluster: str) -> tuple[dict[str, object], str]:
        assert entry.run(["plan", "tiny", "--cluster", cluster, "--gpus", "2", "--time-limit", "0.3s", "--json"]) == 0
        said = capsys.readouterr()
        return json.loads(said.out), " ".join(said.err.split())

    same, said = planned("a100-nvlink-8")
    assert "estimated" not in said
    other, said = planned("t4-pcie-4")
    assert "was taken on NVIDIA A100-SXM4-40GB; times on Tesla T4 are estimated from it" in said
    assert other["origin"] == "estimated"
    assert any("estimated from FLOPs" in note for note in other["notes"])
    assert other["prediction"]["compute_s"] != same["prediction"]["compute_s"]
    assert entry.run(["explain"]) == 0


def test_a_model_is_not_measured_here_for_another_gpu(traced, monkeypatch, capsys):
    monkeypatch.setattr(choose, "cuda_devices", lambda: 1)
    monkeypatch.setattr(choose, "local_device", lambda _: measured("Tesla T4").device)
    assert entry.run([*PLAN, "logistic", "--gpus", "2"]) == 0
    assert traced == ["logistic"]


def test_links_of_another_gpu_are_not_the_nearest():
    other = replace(nouns.cluster(2), device=presets.load("t4-pcie-4").device)
    found = nearest([other], measured("NVIDIA A100-SXM4-40GB").device, 2)
    assert found.name == "a100-nvlink-2"


def test_an_estimate_says_which_options_it_does_not_count(traced, capsys):
    options = ("--memory-format", "channels_last", "--compile", "components")
    assert entry.run([*PLAN, "logistic", "--gpus", "2", *options]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "--memory-format channels_last and --compile components counts only where a profile was measured" in said


def test_what_a_gpu_cannot_compute_in_is_refused(traced, capsys):
    words = ("plan", "logistic", "--cluster", "v100-dgx1-8", "--gpus", "2")
    assert entry.run([*words, "--precision", "bf16"]) == 3
    assert "states no bf16 peak" in (said := capsys.readouterr().err)
    assert "--precision" in said
    assert entry.run([*words, "--precision", "fp16", "--time-limit", "0.3s"]) == 0
    mixed = ("plan", "logistic", "--cluster", "a100-4-v100-4-100g-rdma", "--precision", "bf16", "--time-limit", "0.3s")
    assert entry.run([*mixed, "--gpus", "4"]) == 0
    capsys.readouterr()
    assert entry.run([*mixed, "--gpus", "8"]) == 2
    assert "V100" in (said := " ".join(capsys.readouterr().err.split()))
    assert "does not compute in bf16" in said
