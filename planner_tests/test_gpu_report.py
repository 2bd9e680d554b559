"""What was sent back from a machine with GPUs, scored against what was sealed before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_report import SEALED, answers, failed, report, scores


def entry(name: str, answer: Any = None, code: int = 0) -> dict[str, Any]:
    return {"piece": "machine", "name": name, "exit_code": code, "seconds": 1.0, "answer": answer}


def sealed_cell(slower: float, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    seal = json.loads((SEALED / "t4-pcie-4.jsonl").read_text().splitlines()[0])
    plan = seal["claim"]["plan"]
    foreseen = plan["prediction"]
    cell = {
        "machine": seal["claim"]["machine"], "model": plan["model_spec"], "strategy": seal["claim"]["strategy"],
        "sha256": seal["sha256"], "predicted_s": foreseen["step_time_s"], "low_s": foreseen["step_time_low_s"],
        "high_s": foreseen["step_time_high_s"], "measured": {"median": foreseen["step_time_s"] * slower}, "why_not": "",
    }  # fmt: skip
    return cell | changes, seal["claim"]


def test_measured_cells_are_scored_and_forged_ones_are_not() -> None:
    cell, _ = sealed_cell(2.0)
    (_, _, said) = scores({"sealed": entry("sealed", {"cells": [cell]})}, SEALED)
    assert "-50.0% off, outside" in said
    forged, _ = sealed_cell(1.0, sha256="0" * 64)
    assert "no such prediction is sealed" in scores({"sealed": entry("sealed", {"cells": [forged]})}, SEALED)[-1]


def test_plans_from_new_profiles_are_held_against_sealed_ones_of_the_same_card_alone() -> None:
    _, claim = sealed_cell(1.0)
    study = entry("study resnet50 ddp", {**claim["plan"], "strategy": claim["strategy"]})
    for card, wanted in ((claim["device_name"], True), ("NVIDIA H100", False)):
        profile = entry("profile resnet50 fp32", {"device": {"name": card}})
        said = scores({"a": profile, "b": study}, SEALED)
        assert ("off what the new profile foresees" in said[-1]) is wanted


def test_a_record_that_was_cut_off_keeps_every_whole_answer_and_failures_are_told(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    kept = [entry("doctor"), entry("links", code=6) | {"error": "noise\nno link"}, entry("fits a 9", code=4)]
    record.write_text("".join(json.dumps(e) + "\n" for e in kept) + '{"piece": "mach')
    assert list(answers(record)) == ["doctor", "links", "fits a 9"]
    assert [failed(e) for e in kept] == [False, True, False]
    page = report(record, ["machine", "speed"], "the command", SEALED)
    assert "3 commands, 1 failed" in page
    assert "links: FAILED with 6: no link" in page
    assert "fits a 9: does not fit" in page
    assert "## speed\n\nnot run" in page
    assert "the command" in page


def test_profiles_that_took_too_long_or_were_disturbed_are_counted(tmp_path: Path) -> None:
    lines = []
    for name, seconds, disturbed in (("a", 40.0, ""), ("b", 80.0, ""), ("c", 50.0, "the GPU was held back by heat")):
        answer = {"device": {"name": "NVIDIA H100"}, "whole": [], "provenance": {"disturbed": disturbed}}
        lines.append(json.dumps(entry(f"profile {name}", answer) | {"seconds": seconds}) + "\n")
    (record := tmp_path / "record.jsonl").write_text("".join(lines))
    page = report(record, ["machine"], "the command", SEALED)
    assert "Profiles in 60 s: 2 of 3, 80 s at most." in page
    assert "profile b: components are +0.0 % off the whole at worst, ok; it took 80 s, TOO LONG" in page
    assert "disturbed while they were measured, and are not trusted: 1." in page
    assert "ok; the GPU was held back by heat" in page


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_run_that_is_stopped_leaves_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    """With the answers that there were, and none of what comes after the end."""
    begun = []

    def ran(argv: tuple[str, ...], limit: float) -> tuple[int, str, str]:
        begun.append(argv)
        if argv == ("second",):
            raise end
        return 0, "{}", ""

    chain = [(name, (name,)) for name in ("first", "second", "third")]
    monkeypatch.setattr(gpu, "PIECES", {"machine": lambda args, out: iter([[chain]])})
    monkeypatch.setattr(gpu, "_gpus", lambda: 1)
    monkeypatch.setattr(gpu, "_run", ran)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(tmp_path), "--cluster", "a100-nvlink-8"])
    with pytest.raises(end):
        gpu.main()
    assert begun == [("first",), ("second",)]
    assert "1 commands, 0 failed" in (tmp_path / "gpu-report.md").read_text()
    assert list(answers(tmp_path / "record.jsonl")) == ["first"]
