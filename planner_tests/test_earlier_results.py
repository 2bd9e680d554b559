"""Results that exist already: a folder of results takes no others, and a file that is replaced is kept beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nouns
import pytest

from asa.cli import entry, places, verbs
from asa.cli.commands import train
from asa.cli.console import Console
from asa.errors import UsageError
from asa.ir import codec
from asa.ir.plan import Plan
from asa.ir.study import Study

MINE = "what somebody else has written\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A profile and a cluster for two devices, in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), Path("profiles/tiny.json"))
    codec.save(nouns.cluster(), Path("profiles/cluster.box.json"))
    return tmp_path


def asa(*words: str, code: int = 0) -> None:
    assert entry.run(list(words)) == code


def plan(*words: str) -> None:
    asa("plan", "profiles/tiny.json", "--gpus", "2", "--cluster", "box", *words)


FILES = {
    ("plan", "output"): ("plan", "profiles/tiny.json", "--gpus", "2", "--cluster", "box", "-o"),
    ("profile", "output"): ("profile", "cnn", "-o"),
    ("cluster measure", "output"): ("cluster", "measure", "-o"),
    ("export", "output"): ("export", "p.json", "--to", "torch", "-o"),
    ("launch", "output"): ("launch", "slurm", "p.json", "-o"),
    ("simulate", "trace"): ("simulate", "p.json", "--trace"),
}
"""Commands that write the file named last."""

FOLDERS = {
    ("plan", "report"): ("plan", "profiles/tiny.json", "--gpus", "2", "--cluster", "box", "--report"),
    ("explain", "report"): ("explain", "p.json", "--report"),
    ("bench", "out"): ("bench", "--models", "cnn", "--gpus", "2", "--out"),
    ("train", "out"): ("train", "p.json", "--out"),
}
"""Commands that write to the folder named last."""


def test_every_option_that_names_a_file_or_folder_to_write_is_tried_here():
    writers = {
        (verb.name, option.field)
        for word in verbs.VERBS
        for verb in verbs.verbs(word)
        for option in verb.options
        if option.name in ("output", "report", "out") or (option.name == "trace" and option.metavar == "FILE")
    }
    # The folder in a job file is that of the run that the job will start.
    assert writers == {*FILES, *FOLDERS, ("launch", "out")}


@pytest.mark.parametrize("what", list(FILES), ids=" ".join)
def test_a_file_that_is_replaced_is_kept_beside_and_a_line_says_so(what, folder, monkeypatch, capsys):
    monkeypatch.setattr("asa.profiler.measure.profile_model", lambda *_, **__: nouns.profile())
    monkeypatch.setattr("asa.profiler.interconnect.measure_cluster", lambda *_, **__: nouns.cluster())
    plan("-o", "p.json")
    path = folder / "taken.json"
    path.write_text(MINE)
    capsys.readouterr()
    asa(*FILES[what], "taken.json")
    assert (folder / "taken.json.~1~").read_text() == MINE
    assert path.read_text() != MINE
    assert "asa: taken.json existed; what it contained is now in taken.json.~1~" in capsys.readouterr().err
    asa(*FILES[what], "taken.json")
    same = "existed" not in capsys.readouterr().err
    assert same != (folder / "taken.json.~2~").exists()
    assert same, "the same result once more takes no place"


def test_numbers_go_on_and_the_plan_that_is_asked_for_is_the_newest(folder):
    for batch in ("16", "32", "64"):
        plan("--global-batch", batch)
    (path,) = (folder / "runs" / "plans").glob("*.json")
    batches = [codec.load(Plan, p).global_batch for p in (path, *sorted(path.parent.glob("*~")))]
    assert batches == [64, 16, 32]
    assert places.newest_plan(None)[1].global_batch == 64


def test_a_plan_found_anew_replaces_itself_but_not_one_that_was_measured(folder):
    path = folder / "p.json"
    made = nouns.plan()
    codec.save(made, path)
    again = replace(made, certificate=replace(made.certificate, solve_s=made.certificate.solve_s + 1))
    places.save_plan(again, path, Console())
    assert codec.load(Plan, path) == again
    assert [p.name for p in folder.glob("p.json*")] == ["p.json"]
    places.save_plan(replace(made, notes=("another",)), path, Console())
    assert codec.load(Plan, folder / "p.json.~1~") == again


def test_a_file_that_could_not_be_replaced_is_where_it_was(folder, capsys):
    path = folder / "f"
    path.write_text(MINE)
    with pytest.raises(OSError, match="full"), places.keeping(Console(), path):
        raise OSError("full")
    assert [p.name for p in folder.glob("f*")] == ["f"]
    assert path.read_text() == MINE
    assert capsys.readouterr().err == ""


def test_a_link_stays_one_and_the_kept_file_lies_beside_its_target(folder):
    (folder / "real").mkdir()
    target = folder / "real" / "f"
    target.write_text(MINE)
    (folder / "link").symlink_to(target)
    with places.keeping(Console(), folder / "link"):
        codec.write("new", folder / "link")
    assert (folder / "link").is_symlink()
    assert target.read_text() == "new"
    assert (folder / "real" / "f.~1~").read_text() == MINE


@pytest.mark.parametrize("name", list(places.RESULTS))
@pytest.mark.parametrize("what", list(FOLDERS), ids=" ".join)
def test_a_folder_with_results_takes_no_others(what, name, folder, capsys):
    plan("-o", "p.json")
    held = folder / "held"
    held.mkdir()
    text = json.dumps({"event": "epoch"}) + "\n"
    for file in (name, "plan.json", "report.html"):
        (held / file).write_text(text)
    capsys.readouterr()
    asa(*FOLDERS[what], "held", code=2)
    err = capsys.readouterr().err
    option = "--report" if what[1] == "report" else "--out"
    assert err.startswith(f"asa: held contains {places.RESULTS[name]} ({name}); choose another {option}"), err
    assert {p.name: p.read_text() for p in held.iterdir()} == dict.fromkeys((name, "plan.json", "report.html"), text)


def test_a_page_may_lie_in_the_folder_of_its_own_run_and_is_kept_when_another_is_drawn(folder, capsys):
    plan("-o", "p.json")
    asa("explain", "p.json", "--report", "page")
    first = (folder / "page" / "report.html").read_text()
    capsys.readouterr()
    asa("explain", "p.json", "--report", "page")
    assert "existed" not in capsys.readouterr().err, "the same page"
    asa("explain", "p.json", "--why-not", "ddp", "--report", "page")
    assert (folder / "page" / "report.html.~1~").read_text() == first
    run = folder / "run"
    run.mkdir()
    begin = {"time": 1.0, "event": "note", "message": "a run"}
    (run / "log.jsonl").write_text(json.dumps(begin) + "\n")
    codec.save(codec.load(Plan, folder / "p.json"), run / "plan.json")
    asa("explain", "run", "--report", "run")
    assert (run / "report.html").is_file()
    assert not (run / "plan.json.~1~").exists()


def test_a_run_that_ended_before_its_first_epoch_is_no_result(folder):
    (folder / "log.jsonl").write_text(json.dumps({"event": "start"}) + "\n")
    places.check_unused(folder)
    (folder / "log.jsonl").write_text(json.dumps({"event": "epoch"}) + "\n")
    with pytest.raises(UsageError, match="contains a run"):
        places.check_unused(folder)


def test_a_run_that_is_resumed_keeps_the_traces_it_had(folder, monkeypatch, capsys):
    plan("-o", "p.json")
    (folder / "run" / "trace").mkdir(parents=True)
    codec.save(codec.load(Plan, folder / "p.json"), folder / "run" / "plan.json")
    trace = folder / "run" / "trace" / "rank_0.json.gz"
    trace.write_text(MINE)
    monkeypatch.setattr(train, "_train", lambda *_: codec.write("new", trace))
    monkeypatch.setattr(train, "recall", lambda args, *_: setattr(args, "data", "synthetic"))
    asa("train", "--resume", "--out", "run", "--trace", "2")
    assert (trace.read_text(), trace.with_name("rank_0.json.gz.~1~").read_text()) == ("new", MINE)
    assert "rank_0.json.gz existed; what it contained is now in" in capsys.readouterr().err


def test_a_study_goes_on_in_its_own_folder_alone(folder, capsys):
    codec.save(Study(name="layers", title="t", created="2025-01-02T03:04:05+00:00", rows=()), folder / "s/study.json")
    asa("bench", "--study", "memory", "--out", "s", "--dry-run", code=2)
    assert "s contains the study 'layers'; choose another --out for 'memory'" in capsys.readouterr().err
    asa("bench", "--study", "layers", "--out", "s", "--dry-run")
    (folder / "b").mkdir()
    (folder / "b" / "bench.json").write_text("{}")
    asa("bench", "--study", "layers", "--out", "b", "--dry-run", code=2)


def test_two_processes_do_not_write_to_one_folder(folder):
    with places.taken(folder / "new"):
        with pytest.raises(UsageError, match="another process is writing its results"), places.taken(folder / "new"):
            pass
        (folder / "new" / "bench.json").write_text("{}")
    with places.taken(folder / "new"), places.taken(folder / "empty"):
        pass
    assert (folder / "new").exists()
    assert not (folder / "empty").exists(), "nothing was written"


def test_folders_of_one_second_have_different_names(folder, monkeypatch):
    first = places.datetime(2025, 1, 2, 3, 4, 5)
    monkeypatch.setattr(places, "datetime", type("Clock", (), {"now": staticmethod(lambda _: first)}))
    paths = []
    for _ in range(3):
        paths.append(places.new_folder(folder, "bench"))
        paths[-1].mkdir()
    assert [p.name for p in paths] == ["bench-20250102-030405", "bench-20250102-030405-2", "bench-20250102-030405-3"]
