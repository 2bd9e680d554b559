"""Plans for devices that are elsewhere, of models that were never measured: traced once."""

from __future__ import annotations

import json

import pytest

from asa.cli import choose, entry, estimates

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
