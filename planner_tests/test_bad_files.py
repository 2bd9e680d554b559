"""Profiles, clusters and plans that cannot be used, or hardly: named with the place inside them, exit code 3."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import nouns
import pytest
from refusals import refused, user_folder

from asa.cli import entry
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.cluster import Device
from asa.ir.plan import Plan


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    return user_folder(tmp_path, monkeypatch)


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
        (lambda _: "null", "holds a JSON null"),
        (lambda _: "[" * 100_000, "it is nested too deeply"),
        (lambda _: '{"resnet50": 1}', "is a file of unknown kind, not a"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "install the newer asa"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 0'), "this asa reads 1; create it again"),
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
        (place / name).write_text(json.dumps(data), encoding="utf-8-sig")  # as some editors save
    assert entry.run(["plan", "tiny.json", "--cluster", "cluster.box.json", "--strategies", "ddp"]) == 0
    again = ["--profile", "tiny.json", "--cluster", "cluster.box.json"]
    assert entry.run(["explain", *again]) == 0
    data["fingerprint"] = None
    (place / "cluster.box.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert refused(capsys, 3, "plan", "--cluster", "cluster.box.json").endswith(
        "if the change is intended, remove the fingerprint (at $.fingerprint)"
    )


def test_what_a_noun_refuses_is_told_with_its_file(place, capsys):
    data = codec.document(nouns.plan())
    data["stages"] = [{"ranks": [0, 2]}]
    (place / "bad.json").write_text(json.dumps(data))
    assert "bad.json: stages must use ranks 0..n-1" in refused(capsys, 3, "train", "bad.json")


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
        (
            "cluster.box.json",
            lambda d: d.update(contention=[{"ranks": 2, "slowdown": 3.0}, {"ranks": 2, "slowdown": 1.0}]),
            "two entries of contention for 2 ranks (at $.contention[1])",
        ),
        (
            "cluster.box.json",
            lambda d: d.update(num_devices=10**9) or d["levels"][-1].update(devices=10**9),
            "has 1000000000 devices, not 1 to 16384 (at $.num_devices)",
        ),
        (
            "cluster.box.json",
            lambda d: d.update(devices_per_host=0),
            "a host has at least 1 device, not 0 (at $.devices_per_host)",
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
        (lambda d: d["prediction"].update(step_time_low_s=8.0, step_time_high_s=9.0), "is not in its interval, 8.0"),
        (lambda d: d["certificate"].update(lower_bound_s=-1.0), "a bound of 0 to 1e+09 s, not -1.0"),
        (lambda d: d["certificate"].update(gap=-5.0), "a gap of 0 to 1, not -5.0"),
        (lambda d: d["confidence"].update(p_best=7.0), "a probability of 7.0 is not 0 to 1"),
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


@pytest.mark.parametrize("command", ["explain", "simulate"])
@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("prediction", "step_time_s", "its profile and cluster give"),
        ("certificate", "lower_bound_s", "and a gap of 0, which do not fit"),
    ],
)
def test_a_plan_whose_numbers_were_edited_is_told_so(command, part, name, words, place, capsys):
    assert entry.run(["plan", "-o", "plan.json"]) == 0
    data = json.loads((place / "plan.json").read_text())
    del data["fingerprint"]
    (place / "plan.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert entry.run([command, "plan.json"]) == 0
    assert words not in capsys.readouterr().err
    data[part][name] /= 2
    if part == "prediction":
        data[part]["step_time_low_s"] = 0.0
    (place / "plan.json").write_text(json.dumps(data))
    assert entry.run([command, "plan.json"]) == 0
    assert words in capsys.readouterr().err


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
    said = refused(capsys, 3, "explain", "--cluster", "a100-nvlink-8")
    assert "a100-nvlink-8" in said
    assert "is not the cluster the plan was made for" in said
    assert entry.run(["explain"]) == 0, "an estimate that is torn stands in nobody's way"


def test_a_cluster_of_another_kind_that_states_no_peak_is_refused(place, capsys):
    gpu = Device(name="Some GPU", type="cuda", memory_bytes=2**34)
    codec.save(dataclasses.replace(nouns.cluster(), device=gpu, name="gpus"), place / "gpus.json")
    assert "states no fp32 peak" in refused(capsys, 3, "plan", "--cluster", "gpus.json")


def test_errors_of_a_noun_still_point_into_the_file():
    data = codec.to_data(nouns.plan())
    data["components"][1]["stage"] = 7
    words = r"somewhere: component 'body.0' is in stage 7 of 1 \(at \$\.components"
    with pytest.raises(InvalidInputError, match=words):
        codec.build(Plan, data, source="somewhere")
