"""Sealed predictions: files that only grow, cells that match a machine, and a score that hides nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import nouns
import pytest

from asa.cli.commands.sealed import matches
from asa.errors import InvalidInputError
from asa.ir.bench import BenchEnvironment
from asa.ir.sealed import FIRST, CheckedCell, Claim, SealedCheck, newest, read
from asa.report.text import sealed as report
from asa.report.text.tables import plain
from benchmarks.make_sealed import sealed


def claim(strategy: str = "ddp", step: float = 0.5, **changes) -> Claim:
    made = Claim(
        machine="box", device_name="Test GPU T4", num_devices=2, num_nodes=1, strategy=strategy,
        plan=nouns.plan(strategy, step), place=1, among=2,
    )  # fmt: skip
    return replace(made, **changes)


def write(path, *claims, start=FIRST, revision=1):
    previous = start
    with path.open("a") as stream:
        for one in claims:
            line = sealed(one, revision=revision, written="2025-01-02", asa_version="0", previous=previous)
            previous = json.loads(line)["sha256"]
            stream.write(line)
    return previous


def test_what_was_sealed_is_read_back(tmp_path):
    last = write(tmp_path / "a.jsonl", claim("ddp"), claim("fsdp", 0.7))
    found = read(tmp_path / "a.jsonl")
    assert [s.claim.strategy for s in found] == ["ddp", "fsdp"]
    assert (found[0].previous, found[1].previous, found[1].sha256) == (FIRST, found[0].sha256, last)
    assert found[1].claim == claim("fsdp", 0.7)


def edited(lines):
    return [lines[0].replace('"step_time_s":0.5', '"step_time_s":0.4'), *lines[1:]]


def resealed(lines):
    """A forger who knows the hash still breaks what follows."""
    data = json.loads(lines[0])
    data["claim"]["place"] = 2
    del data["sha256"]
    from asa.ir.sealed import digest

    return [json.dumps({**data, "sha256": digest(data)}), *lines[1:]]


@pytest.mark.parametrize(
    "forge", [edited, resealed, lambda x: x[1:], lambda x: [x[0], *x[2:]], lambda x: [x[1], x[0], x[2]],
              lambda x: [*x, "{}"]]
)  # fmt: skip
def test_nothing_can_be_changed_or_taken_out(tmp_path, forge):
    path = tmp_path / "a.jsonl"
    write(path, claim("ddp"), claim("fsdp", 0.7), claim("tensor", 0.8))
    path.write_text("\n".join(forge(path.read_text().splitlines())) + "\n")
    with pytest.raises(InvalidInputError):
        read(path)


def test_a_later_prediction_stands_beside_the_earlier_one(tmp_path):
    path = tmp_path / "a.jsonl"
    last = write(path, claim("ddp", 0.5), claim("fsdp", 0.7))
    write(path, claim("ddp", 0.6), start=last, revision=2)
    found = read(path)
    assert len(found) == 3
    assert [(s.claim.strategy, s.revision) for s in newest(found)] == [("ddp", 2), ("fsdp", 1)]


def machine(name: str, count: int, kind: str = "cuda") -> BenchEnvironment:
    return BenchEnvironment(
        device_type=kind, device_name=name, num_devices=count, cpu_cores=8, backend="nccl", python_version="3",
        torch_version="2", asa_version="0",
    )  # fmt: skip


def test_a_machine_matches_by_its_devices_and_their_number(tmp_path):
    path = tmp_path / "a.jsonl"
    gpu = replace(nouns.plan(), device_type="cuda")
    write(path, claim(plan=gpu), claim("fsdp", plan=gpu, num_nodes=2), claim("asa", plan=nouns.plan()))
    one, two_nodes, cpu = read(path)
    assert matches(one, machine("Tesla T4", 2))
    assert not matches(one, machine("Tesla T4", 4))
    assert not matches(one, machine("Tesla V100", 2))
    assert not matches(two_nodes, machine("Tesla T4", 2))
    assert not matches(cpu, machine("Tesla T4", 2))


def cell(strategy: str, predicted: float, measured: float | None) -> CheckedCell:
    return CheckedCell(
        machine="box", model="tiny", strategy=strategy, input_shape=(3, 32, 32), ranks=2, global_batch=8,
        origin="estimated", sealed="2025-01-02", sha256="0", predicted_s=predicted, low_s=0.9 * predicted,
        high_s=1.1 * predicted, predicted_memory_bytes=100, predicted_place=1,
        measured=nouns.stat(measured) if measured else None, peak_memory_bytes=110 if measured else None,
        why_not="" if measured else "out of memory",
    )  # fmt: skip


def test_the_score_counts_failures_and_wrong_orders():
    made = SealedCheck(
        created="2025", environment=machine("Tesla T4", 2), sealed=3, machines=("box",),
        cells=(cell("ddp", 1.0, 1.05), cell("fsdp", 1.2, 0.9), cell("tensor", 2.0, None)),
    )  # fmt: skip
    s = report.scores(made)
    assert (s["measured"], s["failed"]) == (2, 1)
    assert s["coverage_90"] == pytest.approx(0.5)
    assert s["order"] == 0
    assert s["regret_mean"] == pytest.approx(1.05 / 0.9 - 1)
    assert s["memory_under"] == 2
    text = plain(report.render(made), width=200)
    assert "failed: out of memory" in text
    assert "1 failed" in text


def test_a_machine_nobody_sealed_is_told_so_in_one_line():
    made = SealedCheck(created="2025", environment=machine("Tesla P4", 3), sealed=7, machines=("box",), cells=())
    text = plain(report.render(made), width=200).strip()
    assert text.count("\n") == 0
    assert "3 x Tesla P4" in text
    assert "7 sealed predictions" in text
    assert report.scores(made)["mape"] is None
