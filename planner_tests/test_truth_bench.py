"""The command of the public record: its document, what is missing or broken, and scaling predicted from structure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import known_models
import pytest

from asa.report.text.tables import plain
from asa.strategies import offered
from benchmarks.truth import __main__ as command
from benchmarks.truth import show as report
from benchmarks.truth import suite
from benchmarks.truth.figures import Figure, Truth
from benchmarks.truth.scaling import Predictor

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth"
here = pytest.mark.skipif(not TRUTH.is_dir(), reason="the public measurements (../shared/truth) are not here")


def test_a_missing_folder_ends_with_5_and_one_line(tmp_path, capsys):
    assert command.main(["--truth", str(tmp_path / "none")]) == 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--truth DIR" in said


def test_an_unknown_part_is_a_mistake_of_the_command_line(tmp_path, capsys):
    assert command.main(["--only", "pipedram", "--truth", str(tmp_path)]) == 2
    assert "pipedream" in capsys.readouterr().err


@here
def test_files_that_are_not_there_are_left_out_and_said_so(tmp_path, capsys):
    shutil.copytree(TRUTH / "pipedream", tmp_path / "pipedream")
    assert command.main(["--only", "pipedream,vtrain", "--truth", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert found["kind"] == "truth"
    assert len(found["figures"]) == 5
    assert any("vtrain_iterations.csv" in text for text in found["left_out"])


def test_a_folder_without_any_of_the_files_ends_with_5(tmp_path, capsys):
    assert command.main(["--only", "piper,vtrain", "--truth", str(tmp_path)]) == 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "vtrain_iterations.csv is not in" in said
    assert "scaling" not in said, "it was not asked for"


@here
def test_a_broken_file_ends_with_3_and_the_place(tmp_path, capsys):
    (tmp_path / "pipedream").mkdir()
    text = (TRUTH / "pipedream" / "vgg16.txt").read_text()
    (tmp_path / "pipedream" / "vgg16.txt").write_text(text[: len(text) // 2 - 20])
    assert command.main(["--only", "pipedream", "--truth", str(tmp_path)]) == 3
    assert "(at line " in capsys.readouterr().err


@here
def test_the_document_has_every_figure_with_its_target(tmp_path, capsys):
    shutil.copytree(TRUTH / "pipedream", tmp_path / "pipedream")
    assert command.main(["--only", "pipedream", "--truth", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["figures"]) == 5
    assert all(f["met"] is True and f["target"] and f["part"] == "pipedream" for f in found["figures"])
    assert len(found["left_out"]) == 3


def test_the_default_folder_is_beside_the_repository():
    assert TRUTH == command.FOLDER


def test_missed_targets_are_repeated_at_the_end():
    def figure(name: str, met: bool | None) -> Figure:
        return Figure(part="p", name=name, figure=0.5, unit="s", target="<= 1", met=met, note=f"why {name}")

    made = Truth(figures=(figure("a", True), figure("b", False), figure("c", None)), left_out=("q: not asked for",))
    said = plain(report.render(made))
    assert "1 of 2 targets met" in said
    assert "missed: b" in said
    assert "why b" in said
    assert "left out: q" in said


def predict(model: str, preset: str, batch: int, gpus: int) -> float:
    graph = {"resnet50": known_models.resnet50, "vgg16": known_models.vgg16}[model]()
    return Predictor(offered()).rate(graph, preset, "fp32" if preset.startswith("v100") else "fp16", batch, gpus)


def test_scaling_is_predicted_from_structure_alone():
    efficiency = predict("resnet50", "v100-dgx1-8", 32, 8) / (8 * predict("resnet50", "v100-dgx1-8", 32, 1))
    assert 0.90 <= efficiency <= 0.99
    assert predict("vgg16", "3090-pcie-8", 64, 8) <= predict("vgg16", "3090-pcie-8", 64, 4)
    assert predict("resnet50", "3090-pcie-8", 64, 8) < 0.6 * 8 * predict("resnet50", "3090-pcie-8", 64, 1)


@here
def test_scaling_needs_no_more_than_three_structures():
    asked: list[str] = []

    def graphs(model: str):
        asked.append(model)
        return {"vgg16": known_models.vgg16}.get(model, known_models.resnet50)()

    found = list(suite.scaling_figures(TRUTH, Predictor(offered()), graphs))
    assert set(asked) <= {"resnet50", "resnet101", "vgg16"}
    assert len(found) >= 6
    assert all(f.note for f in found)
    five = next(f for f in found if "5 GPUs over 4" in f.name)
    assert five.met
