"""The four commands one after the other, as a user types them, on two real ranks; and what a user can get wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nouns
import pytest
from forked import asa
from started import asa_started

from asa.cli.ending import Terminated
from asa.errors import WorkersFailedError
from asa.executor.measuring import benchmark
from asa.ir import codec
from asa.ir.bench import Bench

SMALL = ("--input", "3x8x8", "--classes", "10", "--global-batch", "8")


def process(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Really ``python -m asa``, which imports everything itself."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ASA_")}
    done = subprocess.run(
        [sys.executable, "-m", "asa", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a cluster, a measured profile and a plan."""
    folder = tmp_path_factory.mktemp("user")
    codec.save(nouns.cluster(2), folder / "profiles" / "cluster.box.json")
    asa("profile", "cnn", *SMALL, "--device", "cpu", "--time-limit", "4s", "--max-tensor-degree", "2", cwd=folder)
    data = json.loads(process("plan", "cnn", "--gpus", "2", "--cluster", "box", "--json", cwd=folder).stdout)
    assert data["kind"] == "plan"
    return folder


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Terminated(), WorkersFailedError("rank 1 of 2 died")])
def test_a_comparison_that_ends_early_leaves_the_rounds_it_had(place, tmp_path, monkeypatch, end):
    real = benchmark.measure

    def ended(*args, on_message, **options):
        def hear(rank, message):
            on_message(rank, message)
            if message["round"] == 2:
                raise end

        return real(*args, on_message=hear, **options)

    monkeypatch.setattr(benchmark, "measure", ended)
    argv = ("bench", "--models", "cnn", *SMALL, "--gpus", "2", "--device", "cpu", "--cluster", "box", "--data",
            "digits", "--strategies", "ddp,asa", "--budget", "30s", "--out", str(tmp_path))  # fmt: skip
    code = {KeyboardInterrupt: 130, Terminated: 143, WorkersFailedError: 6}[type(end)]
    said = asa(*argv, cwd=place, code=code).stderr
    assert "cnn: ended after round 2 of" in said
    made = codec.load(Bench, tmp_path / "bench.json")
    assert {r.strategy for r in made.results if r.step_time_s is not None} == {"ddp", "asa"}
    assert all(r.step_time_s.n in (2, 4) for r in made.results), "the steps of two rounds; the first plan has two turns"
    assert any("ended after round 2" in n for n in made.notes)
    assert (tmp_path / "report.html").is_file()


def test_the_newest_plan_is_trained_without_being_named(place):
    done = process(
        "train", "--data", "digits", "--epochs", "2", "--steps-per-epoch", "3", "--out", "run", "--json", cwd=place
    )
    result = json.loads(done.stdout)
    assert result["status"] == "done"
    assert [e["epoch"] for e in result["epochs"]] == [0, 1]
    assert (place / "run" / "log.jsonl").is_file()
    assert json.loads((place / "run" / "result.json").read_text()) == result
    assert "epoch 2: loss" in done.stderr
    again = asa("train", "--resume", "--out", "run", "--data", "digits", "--epochs", "2", cwd=place)
    assert "all 2 epochs are done; --epochs 3 trains on" in again.stderr


def test_the_rest_of_a_run_is_given_what_its_beginning_was(place):
    words = ("--data", "digits", "--steps-per-epoch", "2", "--seed", "5", "--optimizer", "adamw", "--out", "half")
    asa("train", *words, cwd=place)
    rest = asa("train", "--resume", "--out", "half", "--epochs", "2", cwd=place)
    assert "as in the run before: --data digits --steps-per-epoch 2 --optimizer adamw --seed 5" in rest.stderr
    starts = [json.loads(line) for line in (place / "half" / "log.jsonl").read_text().splitlines()]
    first, second = (e["settings"] for e in starts if e["event"] == "start")
    assert second == first | {"epochs": 2, "resume": True}
    fewer = asa("train", "--resume", "--out", "half", "--epochs", "3", "--gpus", "1", cwd=place)
    assert "planning again, for 1 devices in place of 2" in fewer.stderr
    assert json.loads((place / "half" / "plan.json").read_text())["gpus"] == 1
    assert [e["epoch"] for e in json.loads((place / "half" / "result.json").read_text())["epochs"]] == [0, 1, 2]
    other = asa("train", "--resume", "--out", "half", "--seed", "6", cwd=place, code=2)
    assert "the checkpoint was made with seed 5, this run has 6" in other.stderr


def test_a_run_on_emulated_devices_says_that_nothing_was_learnt(place):
    (profile,) = (place / "profiles").glob("cnn.*.json")
    device = f"emulated:profiles/{profile.name}"
    words = ("--data", "digits", "--steps-per-epoch", "3", "--out", "pretended", "--json")
    done = asa("train", "--device", device, *words, cwd=place)
    result = json.loads(done.stdout)
    assert result["emulated"].startswith("emulated ")
    assert result["emulated"].endswith(f"from profiles/{profile.name}; nothing is trained")
    assert json.loads((place / "pretended" / "result.json").read_text()) == result
    assert "epoch 1: emulated, nothing trained, " in done.stderr
    assert [p.name for p in (place / "pretended").iterdir() if p.name.startswith(".")] == []


def test_a_comparison_seals_its_plans_before_it_measures(place):
    argv = (
        "bench",
        "--models",
        "cnn",
        *SMALL,
        "--gpus",
        "2",
        "--device",
        "cpu",
        "--cluster",
        "box",
        "--data",
        "digits",
    )
    done = asa(*argv, "--strategies", "single,ddp,asa", "--budget", "2s", "--out", "bench", cwd=place)
    assert "cnn on 2 x" in done.stdout
    assert "\nFastest " in done.stdout
    made = codec.load(Bench, place / "bench" / "bench.json")
    assert [r.strategy for r in made.results] == ["single", "ddp", "asa"]
    assert all(r.step_time_s is not None and r.step_time_s.median > 0 for r in made.results)
    assert all(s.written <= made.started for s in made.sealed)
    assert any(c.left == c.right for c in made.comparisons), "the A/A comparison"
    for s in made.sealed:
        plan = place / "bench" / "plans" / f"cnn.{s.strategy}.json"
        assert json.loads(plan.read_text())["fingerprint"] == s.plan_fingerprint
    assert (place / "bench" / "report.html").is_file()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("profile", "resnet5O"), 2, "resnet50"),
        (("plan", "gone.json"), 3, "gone.json"),
        (("plan", "--gpus", "64", "--cluster", "box"), 2, "64"),
        (("plan", "--gpus", "2", "--cluster", "box", "--memory", "0.0001"), 4, "GiB"),
        (("plan", "--gpus", "2", "--cluster", "boks"), 2, "boks"),
        (("plan", "--strategies", "dpp", "--cluster", "box"), 2, "dpp"),
        (("plan", "--pin", "nowhere=tensor@2", "--cluster", "box"), 2, "nowhere"),
        (("plan", "profiles/cluster.box.json"), 3, "is a cluster, not a profile"),
        (("train", "profiles/cluster.box.json"), 3, "is a cluster, not a plan"),
        (("train", "--resume"), 7, "to resume"),
        (("train", "--data-root", "nowhere"), 3, "nowhere"),
        (("explain", "--why-not", "magic"), 2, "magic"),
    ],
)
def test_mistakes_end_in_one_line_and_their_exit_code(place, argv, code, words):
    done = asa(*argv, cwd=place, code=code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("asa: ")
    assert words in last
    assert done.stdout == ""


def test_a_truncated_plan_is_refused(place):
    (text,) = [p.read_text() for p in (place / "runs" / "plans").glob("*.json")]
    (place / "half.json").write_text(text[: len(text) // 2])
    (place / "edited.json").write_text(text.replace('"num_microbatches": 1', '"num_microbatches": 2'))
    assert "is not valid JSON" in asa("train", "half.json", cwd=place, code=3).stderr
    assert "was changed after it was written" in asa("verify", "edited.json", cwd=place, code=3).stderr


def test_explain_and_simulate_read_the_newest_plan(place):
    assert "next best" in asa("explain", cwd=place).stdout
    assert "communication" in asa("simulate", "--trace", "t.json", cwd=place).stdout
    assert json.loads((place / "t.json").read_text())["traceEvents"]


def test_finalists_are_measured_and_the_plan_says_what_that_changed(place):
    done = asa("plan", "--gpus", "2", "--cluster", "box", "--verify", "3", "--budget", "2s", "--json", "-o", "v.json",
               cwd=place)  # fmt: skip
    data = json.loads(done.stdout)
    measured = data["measured"]
    assert measured["step_time_s"]["n"] >= 1
    assert measured["steps"] > measured["step_time_s"]["n"]
    assert 2 <= len(measured["trials"]) <= 3
    assert measured["after"]["expected_regret"] >= 0
    assert any("P(best)" in note for note in data["notes"])
    chosen = [t for t in measured["trials"] if t["step_time_s"] == measured["step_time_s"]]
    stock = [t for t in measured["trials"] if t["strategy"] == "ddp" and t["step_time_s"]]
    assert all(chosen[0]["step_time_s"]["median"] <= t["step_time_s"]["median"] for t in stock)
    said = asa("explain", "v.json", "--cluster", "box", cwd=place).stdout
    assert "P(best)" in said
    asa("train", "v.json", "--data", "digits", "--steps-per-epoch", "2", "--out", "verified", cwd=place)


def test_sealed_predictions_are_checked_on_a_machine_they_speak_of(place):
    from asa.ir.plan import Plan
    from asa.ir.sealed import FIRST, Claim
    from asa.launch.devices import cpu_name
    from benchmarks.make_sealed import sealed

    (path,) = (place / "runs" / "plans").glob("*.json")
    plan = codec.load(Plan, path)
    (place / "sealed").mkdir()
    for name, file in ((cpu_name(), "here"), ("Another CPU", "there")):
        claim = Claim(machine=file, device_name=name, num_devices=2, num_nodes=1, strategy="asa", plan=plan, place=1,
                      among=1)  # fmt: skip
        line = sealed(claim, revision=1, written="2025-01-02", asa_version="0", previous=FIRST)
        (place / "sealed" / f"{file}.jsonl").write_text(line)
    argv = ("bench", "--check-sealed", "--sealed", "sealed", "--gpus", "2", "--device", "cpu", "--budget", "2s")
    data = json.loads(asa(*argv, "--json", cwd=place).stdout)
    assert len(data["cells"]) == 1
    assert data["cells"][0]["measured"]["median"] > 0
    assert data["scores"]["measured"] == 1


@pytest.mark.parametrize("discipline", ["ps_sync", "diloco:period=3", "fedavg:period=3", "pipedream"])
def test_real_ranks_hold_what_a_plan_says_that_they_hold_for_its_discipline(place, tmp_path, discipline):
    shutil.copytree(place / "profiles", tmp_path / "profiles")
    asa("plan", "cnn", "--gpus", "2", "--cluster", "box", "--strategies", discipline, "-o", "plan.json", cwd=tmp_path)
    few = ("--epochs", "2", "--steps-per-epoch", "6")  # memory is that of the third step, after which ranks average
    # In a process that has done nothing before, from which memory is measured.
    run = asa_started("train", "plan.json", "--data", "digits", *few, "--out", "run", cwd=tmp_path)
    assert run.wait() == 0, run.err.read_text()
    memory = json.loads((tmp_path / "run" / "result.json").read_text())["summary"]["memory_bytes_per_rank"]
    for promised, measured in zip(memory["predicted"], memory["measured"], strict=True):
        # A rank that is not waited for frees its message a little earlier: up to a sixth less.
        assert measured <= promised <= 1.2 * measured, memory


def test_a_comparison_in_which_training_diverges_says_so(place, tmp_path):
    argv = ("bench", "--models", "cnn", *SMALL, "--gpus", "2", "--device", "cpu", "--cluster", "box", "--data",
            "digits", "--strategies", "ddp", "--budget", "2s", "--lr", "1e30", "--out", str(tmp_path))  # fmt: skip
    done = asa(*argv, cwd=place)
    assert "diverged" in done.stdout
    (result,) = codec.load(Bench, tmp_path / "bench.json").results
    assert result.accuracy[-1].train_loss is None


def test_a_comparison_that_cannot_be_stored_is_shown(place, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    monkeypatch.setattr("asa.report.pages.bench.write", full)
    argv = ("bench", "--models", "cnn", *SMALL, "--gpus", "2", "--device", "cpu", "--cluster", "box", "--data",
            "digits", "--strategies", "ddp", "--budget", "2s", "--out", str(tmp_path))  # fmt: skip
    done = asa(*argv, cwd=place, code=5)
    assert "No space left on device" in done.stderr
    assert "ddp" in done.stdout
