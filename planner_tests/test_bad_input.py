"""What people get wrong: one line with the number that decides and the remedy, the documented exit code."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import nouns
import pytest

from asa.cli import entry, places
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.cluster import Device
from asa.ir.plan import Plan, Stage

MANY = str(10**9)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A directory with one profile and one cluster of two CPU ranks, and nothing that was shipped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "source" / "profiles")
    for name in [n for n in os.environ if n.startswith("ASA_")]:
        monkeypatch.delenv(name)
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")
    return tmp_path


def refused(capsys, code: int, *argv: str) -> str:
    """The one line a command ends with."""
    assert entry.run(argv) == code, capsys.readouterr()
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("asa: ")
    assert "internal error" not in last
    return last


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan", "--memory", "1e305"), "above 1048576"),
        (("plan", "--memory", "inf"), "--memory"),
        (("plan", "--gpus", MANY), "asked for 1000000000 devices, the largest cpu cluster known, box, has 2"),
        (("plan", "--gpus", "-1"), "-1 is below 1"),
        (("plan", "--global-batch", "0"), "0 is below 1"),
        (("plan", "--pin", "head=tensor@2", "--pin", "he*=none@1"), "contradict each other on component head"),
        (("plan", "nowhere.json", "--verify", "1"), "--verify: 1 is below 2, the fewest that can be compared"),
        (("train", "--seed", "99999999999"), "above 4294967295"),
        (("cluster", "measure", "--gpus", MANY), "asked for 1000000000 ranks"),
        (("bench", "--device", "cpu", "--gpus", MANY), "asked for 1000000000 ranks"),
    ],
)
def test_impossible_numbers_are_usage_errors(argv, words, capsys):
    assert words in refused(capsys, 2, *argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--out", "there"), "leave out --out"),
        (("--global-batch", "64"), "leave out --global-batch"),
        (("--device", "emulated:gpu.json"), "--check-sealed measures, an emulated device sleeps"),
        (("--models", "cnn"), "no sealed prediction is of --models cnn; they are of resnet50, vit_b_16"),
    ],
)
def test_sealed_predictions_are_run_as_they_are_or_not_at_all(argv, words, capsys, monkeypatch):
    monkeypatch.setattr("asa.cli.ground.device_of", lambda *_: pytest.fail("looked at devices"))
    assert words in refused(capsys, 2, "bench", "--check-sealed", *argv)


BENCH = ("bench", "--device", "cpu", "--gpus", "2", "--models", "cnn", "--cluster", "box")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--strategies", "ddp,dpp"), 2, "no strategy 'dpp'"),
        (("--models", "cnn,resnet5O"), 2, "resnet50"),
        (("--classes", "10"), 2, "cifar100 has 100 classes, the model tells 10 apart; try --classes 100"),
        (("--global-batch", MANY), 2, "larger than the 5000"),
        (("--cluster", "a100-nvlink-8"), 2, "8 cuda devices, this comparison runs on 2 of cpu"),
        (("--cluster", "box", "--gpus", "3"), 2, "box has 2 cpu devices"),
        (("--data-root", "nowhere"), 3, "nowhere"),
        (("--data-root", "torn"), 3, "torn: train.bin is truncated: 3073 bytes"),
        (("--out", "file"), 5, "file is not a directory; choose another --out"),
    ],
)
def test_a_comparison_is_refused_before_anything_is_measured(argv, code, words, place, capsys, monkeypatch):
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured something")

    monkeypatch.setattr("asa.cli.choose.profile_here", measured)
    monkeypatch.setattr("asa.profiler.interconnect.measure_cluster", measured)
    (place / "file").write_text("")
    (place / "torn").mkdir()
    for name in ("train.bin", "test.bin"):
        (place / "torn" / name).write_bytes(bytes(3073))
    assert words in refused(capsys, code, *BENCH, *argv)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--data-root", "nowhere"), 3, "--data-root nowhere does not exist"),
        (("--out", "file"), 5, "file is not a directory; choose another --out"),
        (("--out", "file/below"), 5, "file is not a directory; choose another --out"),
        (("--out", "nowhere", "--resume"), 7, "no run in nowhere to resume"),
        (("--gpus", "64"), 2, "the plan is for 2 devices, asked for 64; plan again with --gpus"),
    ],
)
def test_folders_that_cannot_be_used_are_seen_before_anything_is_started(argv, code, words, place, capsys, monkeypatch):
    monkeypatch.setattr("asa.cli.train._train", lambda *_: pytest.fail("started to train"))
    (place / "file").write_text("")
    codec.save(nouns.plan(), place / "plan.json")
    assert words in refused(capsys, code, "train", "plan.json", *argv)
    assert not (place / "nowhere").exists()


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _not_a_number(text: str) -> str:
    for number in ('"dispatch_floor_s": 1e-05', '"slowdown": 1.0', '"gap": 0.0'):
        text = text.replace(number, number.partition(" ")[0] + " NaN")
    return text


def _by_hand(text: str) -> str:
    return text.replace('"global_batch": 8', '"global_batch": 9').replace('"num_devices": 2', '"num_devices": 1')


@pytest.mark.parametrize("which", ["profiles/tiny.json", "profiles/cluster.box.json", "plan.json"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "is not valid JSON"),
        (lambda _: "", "is not valid JSON"),
        (lambda _: "[1]", "holds a JSON list"),
        (lambda _: '{"resnet50": 1}', "is a file of unknown kind, not a"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema version 99"),
        (_by_hand, "was changed after it was written"),
        (lambda text: text.replace('"kind"', '"extra": 1,\n "kind"'), ".extra"),
        (lambda text: text.replace('"fp32"', '"fp8"').replace('"gloo"', '"mpi"'), "at $."),
        (_not_a_number, "NaN is not a number"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_place(which, damage, words, place, capsys):
    codec.save(nouns.plan(), place / "plan.json")
    whole = (place / which).read_text()
    (place / "bad.json").write_text(damage(whole))
    argv = {"plan.json": ("explain", "bad.json"), "profiles/tiny.json": ("plan", "bad.json")}.get(
        which, ("plan", "--cluster", "bad.json")
    )
    said = refused(capsys, 3, *argv)
    assert words in said
    assert "bad.json" in said


def test_files_written_by_hand_need_no_fingerprint_and_an_edited_one_is_told_so(place, capsys):
    for name in ("tiny.json", "cluster.box.json"):
        data = json.loads((place / "profiles" / name).read_text())
        del data["fingerprint"]
        if "levels" in data:
            data["device"]["memory_bytes"] = 2**34
        (place / name).write_text(json.dumps(data))
    assert entry.run(["plan", "tiny.json", "--cluster", "cluster.box.json", "--strategies", "ddp"]) == 0
    again = ["--profile", "tiny.json", "--cluster", "cluster.box.json"]
    assert entry.run(["explain", *again]) == 0
    data["fingerprint"] = None
    (place / "cluster.box.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert refused(capsys, 3, "plan", "--cluster", "cluster.box.json").endswith(
        "if the change is meant, leave the fingerprint out (at $.fingerprint)"
    )


def test_what_a_noun_refuses_is_told_with_its_file(place, capsys):
    data = codec.document(nouns.plan())
    data["stages"] = [{"ranks": [0, 2]}]
    (place / "bad.json").write_text(json.dumps(data))
    assert "bad.json: stages must use ranks 0..n-1" in refused(capsys, 3, "train", "bad.json")


def test_more_cpu_ranks_than_were_measured_are_derived_and_found_again(place, capsys):
    assert entry.run(["plan", "--gpus", "8", "--strategies", "ddp", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["gpus"], made["cluster"], made["origin"]) == (8, "box-as-8", "estimated")
    assert "the links of box-as-8 are derived, not measured here" in made["notes"]
    assert entry.run(["plan", "--gpus", "2", "--strategies", "ddp", "--json"]) == 0
    two = json.loads(capsys.readouterr().out)["prediction"]
    assert made["prediction"]["compute_s"] > two["compute_s"], "more ranks on the same cores compute nothing faster"
    assert entry.run(["simulate", "runs/plans/tiny.box-as-8.8.json"]) == 0


def test_whole_strategies_that_do_not_fit_come_with_a_memory_that_does(capsys):
    said = refused(capsys, 4, "plan", "--strategies", "ddp,tensor", "--memory", "0.1")
    assert "GiB of 0.1 GiB" in said
    enough = said.split("try --memory ")[1].split()[0]
    assert entry.run(["plan", "--strategies", "ddp,tensor", "--memory", enough]) == 0


def test_the_search_is_named_as_a_remedy_only_where_it_finds_something(capsys):
    said = refused(capsys, 4, "plan", "--strategies", "ddp", "--pin", "head=tensor@2")
    assert said.endswith("ddp: not allowed by the pins; try --strategies asa")
    assert "--strategies asa" not in refused(capsys, 4, "plan", "--strategies", "ddp", "--memory", "0.0001")


@pytest.mark.parametrize(
    "argv", [("plan", "-o", "file/plan.json"), ("plan", "-o", "profiles"), ("profile", "cnn", "-o", "file/p.json")]
)
def test_a_place_that_cannot_be_written_is_told_before_the_work(argv, place, capsys):
    (place / "file").write_text("")
    said = refused(capsys, 5, *argv)
    assert "cannot write" in said
    assert said.endswith("choose another -o")


def test_a_trace_that_cannot_be_written_is_one_document(place, capsys):
    (place / "file").write_text("")
    assert entry.run(["plan", "--gpus", "1", "--time-limit", "0.1s", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert entry.run(["simulate", "p.json", "--trace", "file/t.json", "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["exit_code"] == 5


def test_a_component_strategy_is_answered_with_the_name_of_the_whole_one(capsys):
    assert "of the whole model it is called fsdp" in refused(capsys, 2, "plan", "--strategies", "zero3")


def test_nothing_to_resume_is_7_and_leaves_nothing(place, capsys):
    codec.save(nouns.plan(), place / "runs" / "plans" / "p.json")
    assert "no run in gone to resume" in refused(capsys, 7, "train", "--resume", "--out", "gone")
    assert not (place / "gone").exists()


def test_a_plan_for_devices_that_are_not_there_is_5_and_leaves_nothing(place, capsys):
    torch = pytest.importorskip("torch")
    ranks = torch.cuda.device_count() + 1
    stem = nouns.plan().components[0]
    one = dataclasses.replace(stem, data=dataclasses.replace(stem.data, degree=1))
    made = dataclasses.replace(
        nouns.plan(), device_type="cuda", gpus=ranks, components=(one,), stages=(Stage(ranks=tuple(range(ranks))),)
    )
    codec.save(made, place / "plan.json")
    said = refused(capsys, 5, "train", "plan.json", "--out", "run")
    assert f"the plan needs {ranks} CUDA devices, this machine has {ranks - 1}" in said
    assert not (place / "run").exists()
    said = refused(capsys, 5, "verify", "plan.json")
    assert f"{ranks} CUDA devices, this machine has {ranks - 1}; verify with --device cpu" in said


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tiny.json", lambda d: d["updates"].append(d["updates"][0]), "appears twice (at $.updates[5])"),
        ("tiny.json", lambda d: d.update(global_batch=2**25), "is not 1 to 16777216 (at $.global_batch)"),
        ("tiny.json", lambda d: d.update(schema_version=1.0), "schema version 1.0"),
        (
            "cluster.box.json",
            lambda d: d["levels"][0]["tables"].append(d["levels"][0]["tables"][0]),
            "two tables of all_reduce among 2 ranks (at $.levels[0].tables[6])",
        ),
    ],
)
def test_a_profile_or_cluster_that_says_a_thing_twice_or_too_large(name, change, words, place, capsys):
    data = json.loads((place / "profiles" / name).read_text())
    del data["fingerprint"]
    change(data)
    (place / "bad.json").write_text(json.dumps(data))
    said = refused(capsys, 3, "plan", *(("bad.json",) if name == "tiny.json" else ("--cluster", "bad.json")))
    assert words in said


def test_too_many_components_are_refused_before_any_of_them_is_looked_at(place, capsys):
    data = json.loads((place / "profiles" / "tiny.json").read_text())
    data["graph"]["components"] = [{}] * 100_000
    (place / "bad.json").write_text(json.dumps(data))
    assert "has 100000 components, the most is 2000 (at $.graph.components)" in refused(capsys, 3, "plan", "bad.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(num_microbatches=10**6), "1000000 microbatches of 8 samples (at $.num_microbatches)"),
        (
            lambda d: d.update(num_microbatches=2**24, global_batch=2**24),
            "a timeline of 16777216 microbatches of 3 components, more than 500000 passes",
        ),
        (lambda d: d["components"].append(d["components"][0]), "component 'stem' appears twice"),
        (lambda d: d["components"][1].update(name="other"), "component 1 is 'other' and 'body.0'"),
        (
            lambda d: d["components"][1]["tensor"].update(strategy="none", degree=2),
            "strategy none has degree 1, not 2 (at $.components[1].tensor)",
        ),
        (
            lambda d: (
                d.update(stages=[{"ranks": [0]}, {"ranks": [1]}], schedule="none")
                or d["components"][-1].update(stage=1)
            ),
            "2 stages need a schedule (at $.schedule)",
        ),
    ],
)
def test_a_plan_by_hand_that_cannot_be_one(change, words, place, capsys):
    assert entry.run(["plan", "-o", "plan.json"]) == 0
    data = json.loads((place / "plan.json").read_text())
    del data["fingerprint"]
    change(data)
    (place / "plan.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert words in refused(capsys, 3, "simulate", "plan.json")


def test_a_memory_that_no_option_takes_is_no_remedy(place, capsys):
    data = json.loads((place / "profiles" / "tiny.json").read_text())
    del data["fingerprint"]
    data["graph"]["components"][0]["parameter_bytes"] = 10**17
    (place / "vast.json").write_text(json.dumps(data))
    assert refused(capsys, 4, "plan", "vast.json").endswith("the model is too large for any device")


def test_components_that_take_no_time_are_planned(place, capsys):
    data = json.loads((place / "profiles" / "tiny.json").read_text())
    del data["fingerprint"]
    for t in [*data["timings"], *data["updates"]]:
        for what in ("forward", "backward", "step"):
            if what in t:
                t[what].update(median=0.0, p10=0.0, p90=0.0)
    (place / "still.json").write_text(json.dumps(data))
    for more in ((), ("--strategies", "single,ddp"), ("--top", "3"), ("--solver", "exhaustive")):
        assert entry.run(["plan", "still.json", "--json", *more]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["prediction"]["step_time_s"] >= made["certificate"]["lower_bound_s"] >= 0
    assert entry.run(["simulate", "--profile", "still.json"]) == 0


def test_the_best_plans_are_told_in_order(place, capsys):
    assert entry.run(["plan", "--top", "6", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    times = [p["prediction"]["step_time_s"] for p in (made, *made["alternatives"])]
    assert times == sorted(times)
    assert times[0] <= min(b["step_time_s"] for b in made["baselines"] if b["fits"])


def test_too_few_samples_to_verify_on(place, capsys):
    codec.save(nouns.plan(), place / "plan.json")
    assert "need 2; raise --samples" in refused(capsys, 2, "verify", "plan.json", "--samples", "1")


def test_an_emulated_device_of_another_model_is_refused(place, capsys):
    plan = dataclasses.replace(nouns.plan(), components=nouns.plan().components[:2])
    codec.save(plan, place / "plan.json")
    said = refused(capsys, 2, "train", "plan.json", "--device", "emulated:profiles/tiny.json")
    assert "is a profile of tiny (3 components), the plan is of tiny (2)" in said


def test_another_profile_than_the_plans_is_said_to_be_one(place, capsys):
    assert entry.run(["plan"]) == 0
    codec.save(nouns.profile(model="other"), place / "other.json")
    (place / "runs" / "estimates").mkdir()
    (place / "runs" / "estimates" / "torn.json").write_text("{")
    capsys.readouterr()
    said = refused(capsys, 3, "explain", "--profile", "other.json")
    assert "other.json" in said
    assert "is not the profile the plan was made from" in said
    assert entry.run(["explain"]) == 0, "an estimate that is torn stands in nobody's way"


def test_a_cluster_of_another_kind_that_states_no_peak_is_refused(place, capsys):
    gpu = Device(name="Some GPU", type="cuda", memory_bytes=2**34)
    codec.save(dataclasses.replace(nouns.cluster(), device=gpu, name="gpus"), place / "gpus.json")
    assert "states no fp32 peak" in refused(capsys, 3, "plan", "--cluster", "gpus.json")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "3"), "asked for 3 devices, cluster box has 2"),
        (("--strategies", "dpp"), "no strategy 'dpp'"),
        (("--pin", "head"), "is not of the form COMPONENT=STRATEGY"),
        (("--offload", "always"), "offload saves nothing on box"),
    ],
)
def test_a_request_is_refused_before_the_model_is_looked_at(more, words, capsys, monkeypatch):
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured something")

    monkeypatch.setattr("asa.cli.choose.measured", measured)
    assert words in refused(capsys, 2, "plan", "cnn", "--cluster", "box", *more)


def test_errors_of_a_noun_still_point_into_the_file():
    data = codec.to_data(nouns.plan())
    data["components"][1]["stage"] = 7
    words = r"somewhere: component 'body.0' sits in stage 7 of 1 \(at \$\.components"
    with pytest.raises(InvalidInputError, match=words):
        codec.build(Plan, data, source="somewhere")
