"""What docs/files.md says of files by hand: its examples are planned from as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asa.cli import entry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "files.md"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"<!-- ([\w.]+\.json) -->\n```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in found] == ["cluster.json", "profile.json", "mine.sgd.staleness.json"]
    for name, text in found:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_examples_are_planned_from(place, capsys):
    assert entry.run(["plan", "profile.json", "--cluster", "cluster.json", "--time-limit", "1s", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    body, head = made["components"]
    assert (body["data"]["degree"], body["tensor"]["degree"]) == (4, 1)
    assert (head["tensor"]["strategy"], head["tensor"]["degree"]) == ("tensor", 4)
    found = ["--profile", "profile.json", "--cluster", "cluster.json"]
    assert entry.run(["explain", *found]) == 0
    assert entry.run(["simulate", *found]) == 0


def test_a_cluster_of_one_device_has_no_links(place, capsys):
    made = json.loads((place / "cluster.json").read_text()) | {"num_devices": 1, "levels": []}
    (place / "one.json").write_text(json.dumps(made))
    assert entry.run(["plan", "profile.json", "--cluster", "one.json", "-o", "plan.json"]) == 0
    for command in ("launch slurm plan.json", "launch k8s plan.json", "export plan.json --to torch"):
        assert entry.run(command.split()) == 0


def test_an_update_whose_speed_nobody_stated_is_said_to_be_assumed(place, capsys):
    made = json.loads((place / "cluster.json").read_text())
    del made["device"]["memory_bandwidth"]
    (place / "bare.json").write_text(json.dumps(made))
    for name, said in (("cluster", False), ("bare", True)):
        assert entry.run(["plan", "profile.json", "--cluster", f"{name}.json", "--time-limit", "1s"]) == 0
        assert ("how fast Some GPU updates weights" in capsys.readouterr().err) is said


def test_curves_by_hand_say_the_time_to_a_target(place, capsys):
    asked = ["plan", "profile.json", "--cluster", "cluster.json", "--global-batch", "64", "--time-limit", "1s"]
    assert entry.run([*asked, "--consistency", "any", "--target", "accuracy=0.9", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["consistency"]
    by = {r["name"]: r for r in made["rows"]}
    assert by["ddp"]["steps"]["median"] == 20
    assert by["ddp"]["time_to_target"]["median_s"] == pytest.approx(20 * by["ddp"]["step_time_s"])
    assert by["local_sgd"]["time_to_target"] is None
    assert by["local_sgd"]["unknown"]
    assert by["ddp"]["time_to_target"]["cost"] is None
    aimed = [*asked, "--target", "accuracy=0.9", "--price", "3.6"]
    assert entry.run([*aimed, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["consistency"]["rows"]
    assert [r["time_to_target"]["cost"] for r in rows] == [
        pytest.approx(3.6 * 4 * r["time_to_target"]["median_s"] / 3600) for r in rows
    ]  # on four devices
    assert entry.run(aimed) == 0
    assert "its cost" in capsys.readouterr().out.partition("Consistency")[2]
    assert entry.run([*asked, "--json"]) == 0
    assert "consistency" not in json.loads(capsys.readouterr().out)
    for wrong in (["--target", "accuracy=90"], ["--target", "speed=1"], ["--consistency", "some"]):
        assert entry.run([*asked, *wrong]) == 2
        capsys.readouterr()


def _measured(place: Path, seeds: int) -> None:
    """Curves in which ``local_sgd`` reaches the target after 10 global batches and plain training after 30."""
    file = place / "mine.sgd.staleness.json"
    curves = json.loads(file.read_text())

    def runs(*accuracies: float) -> list[dict[str, object]]:
        return [{"seed": s, "losses": [1.2, 0.4, 0.3], "accuracies": accuracies} for s in range(seeds)]

    curves["curves"] = [
        {"setting": {}, "runs": runs(0.5, 0.8, 0.91)},
        {"setting": {"workers": 4, "period": 4}, "runs": runs(0.91, 0.92, 0.93)},
    ]
    file.write_text(json.dumps(curves))


@pytest.mark.parametrize(
    ("seeds", "more", "chosen"),
    [
        (3, (), "local_sgd"),
        (2, (), None),
        (3, ("--strategies", "ddp"), None),
        (3, ("--consistency", "synchronous"), None),
    ],
)
def test_with_a_target_the_discipline_that_surely_reaches_it_first_is_planned(place, capsys, seeds, more, chosen):
    _measured(place, seeds)
    asked = ["plan", "profile.json", "--cluster", "cluster.json", "--global-batch", "64", "--time-limit", "1s"]
    assert entry.run([*asked, "--consistency", "any", "--target", "accuracy=0.9", "--json", "-o", "p.json", *more]) == 0
    made = json.loads(capsys.readouterr().out)
    assert json.loads((place / "p.json").read_text()).get("consistency", {}).get("name") == chosen
    said = [n for n in made["notes"] if n.startswith("chosen for accuracy=0.9: local_sgd takes")]
    assert len(said) == (chosen is not None)


def test_a_preset_that_was_shown_can_be_changed(place, capsys):
    assert entry.run(["cluster", "show", "a100-nvlink-8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    shown["device"]["memory_bytes"] //= 2
    (place / "mine.json").write_text(json.dumps(shown))
    assert entry.run(["cluster", "show", "mine.json"]) == 3
    assert "remove the fingerprint" in capsys.readouterr().err
    del shown["fingerprint"]
    (place / "mine.json").write_text(json.dumps(shown))
    assert entry.run(["cluster", "show", "mine.json"]) == 0


def _chain(place: Path, count: int, parameter_bytes: int, seconds: float, devices: int) -> list[str]:
    """A profile of ``count`` bodies in a row and a cluster of ``devices``, written over those of the page."""
    profile, cluster = (json.loads((place / f"{name}.json").read_text()) for name in ("profile", "cluster"))
    body, timing = profile["graph"]["components"][0], profile["timings"][0]
    body |= {"parameter_bytes": parameter_bytes, "largest_parameter_bytes": parameter_bytes}
    spread = dict.fromkeys(("median", "p10", "p90"), seconds) | {"n": 1}
    timing |= {"forward": spread, "backward": spread}
    names = [f"body.{i}" for i in range(count)]
    profile["graph"]["components"] = [body | {"name": n, "modules": [n]} for n in names]
    profile["timings"] = [timing | {"component": n} for n in names]
    cluster["num_devices"] = cluster["levels"][0]["devices"] = devices
    for name, data in (("profile", profile), ("cluster", cluster)):
        (place / f"{name}.json").write_text(json.dumps(data))
    return ["plan", "profile.json", "--cluster", "cluster.json", "--time-limit", "2s", "--json"]


def test_a_model_that_takes_no_time_runs_on_one_device(place, capsys):
    assert entry.run(_chain(place, 2, 4000, 0.0, 4)) == 0
    assert [s["ranks"] for s in json.loads(capsys.readouterr().out)["stages"]] == [[0]]


def test_a_plan_that_fits_on_few_devices_is_found_on_more(place, capsys):
    """Six times 9 GiB of states in 13.3 GiB: three stages of two components fit, their optimizer's state on the host,
    as long as there is one microbatch."""
    argv = _chain(place, 6, 3 * 1024**3, 1e-2, 8)
    for gpus in ("3", "5"):
        assert entry.run([*argv, "--gpus", gpus]) == 0, gpus
        made = json.loads(capsys.readouterr().out)
        assert made["num_microbatches"] == 1
        assert any(c.get("offload") for c in made["components"])
    assert entry.run([*argv, "--gpus", "2"]) == 4
    said = json.loads(capsys.readouterr().out)["error"]
    assert "devices have 16.0 GiB (less 2.58 GiB" in said
    assert "or --gpus 3" in said, "the nearest number, not the double one"


@pytest.mark.parametrize(
    ("at", "value"), [("input_shape", [3, -1, 8]), ("num_classes", -1), ("prediction.step_time_s", -1.0)]
)
def test_sizes_and_times_below_zero_are_refused_by_their_place(place, capsys, at, value):
    assert entry.run(["plan", "profile.json", "--cluster", "cluster.json", "--time-limit", "1s", "-o", "p.json"]) == 0
    for name, top in (("p.json", None), ("profile.json", "graph")):
        document = json.loads((place / name).read_text())
        document.pop("fingerprint", None)
        *path, last = at.split(".")
        inner = document[top] if top else document
        for key in path:
            inner = inner.get(key, {})
        if last not in inner:
            continue
        inner[last] = value
        (place / "bad.json").write_text(json.dumps(document))
        command = ["explain", "bad.json", "--profile", "profile.json", "--cluster", "cluster.json"]
        capsys.readouterr()
        assert entry.run(command if top is None else ["plan", "bad.json", "--cluster", "cluster.json"]) == 3
        assert f"$.{top + '.' if top else ''}{at}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peaks", "words"),
    [
        ({"memory_bandwidth": 936, "peak_fp32_flops": 35.6}, "FLOPs and bytes per second) of 1e+06 to 1e+30"),
        ({"memory_bandwidth": 1e-300}, "FLOPs and bytes per second) of 1e+06 to 1e+30"),
        ({"peak_fp32_flops": 2e6}, "on Some GPU of 2e+06 FLOPs and 9e+11 bytes per second"),
    ],
)
def test_peaks_in_other_units_are_refused(place, capsys, monkeypatch, peaks, words):
    monkeypatch.setattr("asa.cost.machine.estimate.MOST_SECONDS", 1e5)
    profile, cluster = (json.loads((place / f"{name}.json").read_text()) for name in ("profile", "cluster"))
    profile["device"]["type"] = "cpu"
    cluster["device"] |= peaks
    for name, data in (("profile", profile), ("cluster", cluster)):
        (place / f"{name}.json").write_text(json.dumps(data))
    assert entry.run(["plan", "profile.json", "--cluster", "cluster.json"]) == 3
    assert words in capsys.readouterr().err
