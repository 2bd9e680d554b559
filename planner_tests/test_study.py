"""A study: a grid that resumes, says what it would do, refuses cells with reasons, and merges into one table."""

from __future__ import annotations

import csv
import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nouns
import pytest
import training
from forked import asa

from asa.cli.commands import study as verb
from asa.cli.commands import study_grid, study_runners
from asa.cli.commands.bench import VERBS
from asa.cli.console import Console
from asa.cli.ending import Terminated
from asa.cli.settings import arguments
from asa.errors import PreemptedError, UsageError, WorkersFailedError
from asa.executor.measuring import benchmark
from asa.executor.measuring.benchmark import Cell
from asa.ir import codec
from asa.ir.bench import AccuracyPoint
from asa.ir.study import Published, Study, StudyCell, StudyRow
from asa.launch import signals
from asa.report.figures import drawing
from asa.report.pages import bench as page
from asa.report.pages import study as study_page
from asa.report.text import study as report
from asa.report.text import study_values as study_figures
from asa.report.text import tables, verdicts
from asa.strategies import offered
from planner_tests.stage_plans import staged

TRUTH = Path(__file__).resolve().parents[2] / "shared" / "truth" / "studies.csv"


def args(*words: str):
    return arguments(VERBS[-1], words, {})


def one_call(words, rows=None, **more):
    """A call of the command with the options ``words``, and its rows so far."""
    usual = {"console": None, "study": None, "folder": Path(), "device": "cpu", "name": "Test CPU"}
    return verb._Run(args=words, rows={} if rows is None else rows, **usual | more)


def cell(strategy: str = "ddp", **changes: object) -> StudyCell:
    plain = StudyCell(
        model="tiny", data="digits", input_shape=(3, 8, 8), gpus=2, global_batch=64, strategy=strategy, epochs=10,
        seed=0, precision="fp32", optimizer="sgd", mode="measured", devices="Test CPU",
    )  # fmt: skip
    return replace(plain, **changes)


def row(strategy: str = "ddp", **changes: object) -> StudyRow:
    result = next(r for r in nouns.bench().results if r.strategy == strategy)
    return StudyRow(cell=cell(strategy, **changes), state="measured", result=result, samples_per_epoch=6400)


def study(*rows: StudyRow, **changes: object) -> Study:
    return replace(Study(name="grid", title="A grid", created="2025-01-02T03:04:05+00:00", rows=rows), **changes)


def test_every_study_defines_blocks_of_known_strategies():
    for name in study_grid.known()[:-1]:
        found = study_grid.define(args("--study", name), most=4, cluster_gpus=None)
        assert {b.mode for b in found.blocks if b.gpus <= 4 and not b.cluster} == {"measured"}
        assert len({(b.model, b.data, b.gpus, b.global_batch, b.seed, b.mode, b.cluster) for b in found.blocks}) == len(
            found.blocks
        )
        assert found.differs, "what cannot be as published is said"


def test_options_of_the_grid_replace_what_a_study_has():
    words = ("--study", "layers", "--models", "cnn", "--gpus", "1,2,16", "--seed", "3,4", "--epochs", "1,5")
    found = study_grid.define(args(*words), most=4, cluster_gpus=None)
    assert {(b.model, b.gpus, b.seed, b.epochs, b.mode) for b in found.blocks} == {
        ("cnn", n, s, (1, 5), "measured" if n <= 4 else "predicted") for n in (1, 2, 16) for s in (3, 4)
    }
    assert all("single" in b.strategies for b in found.blocks if b.gpus == 1)
    assert not any("single" in b.strategies for b in found.blocks if b.gpus > 1), "one device is a row of its own"


def test_a_cluster_of_other_devices_is_predicted_with_all_of_them():
    words = args("--study", "grid", "--models", "tiny", "--cluster", "a100-nvlink-8")
    (block,) = study_grid.define(words, most=0, cluster_gpus=8).blocks
    assert (block.gpus, block.mode, block.cluster) == (8, "predicted", "a100-nvlink-8")


def test_a_grid_needs_models():
    with pytest.raises(UsageError, match="name models with --models"):
        study_grid.define(args("--study", "grid"), most=2, cluster_gpus=None)


@pytest.mark.parametrize("words", [("--gpus", "1,2"), ("--data", "digits,mnist"), ("--seed", "1,2")])
def test_several_values_without_a_study_are_refused(words):
    with pytest.raises(UsageError, match="several make a grid; add --study grid"):
        VERBS[-1].run(args(*words), None)


@pytest.mark.skipif(not TRUTH.is_file(), reason="the published figures are not here")
def test_published_figures_are_those_of_the_record():
    names = {"ddp_fsdp": "memory", "parameter_server": "parameter-servers"}
    models = {"efficientnet_v2": ["efficientnet_v2_l"], "unnamed": [""], "resnet50 vit_b_16": ["resnet50", "vit_b_16"]}
    wanted = set()
    with TRUTH.open() as stream:
        for r in csv.DictReader(stream):
            for model in models.get(r["model"], [r["model"]]):
                key = (names.get(r["study"], r["study"]), r["strategy"], model, int(r["gpus"]), r["metric"])
                wanted.add((*key, float(r["value"])))
    found = set()
    for name in study_grid.known()[:-1]:
        for p in study_grid.define(args("--study", name), most=2, cluster_gpus=None).published:
            found.add((name, p.strategy, p.model, p.gpus, p.metric, p.value))
            assert p.source
    assert found == wanted


def test_one_device_is_one_device_in_a_block_of_several():
    words = args("--study", "grid", "--models", "tiny", "--gpus", "2", "--strategies", "single,ddp")
    (block,) = study_grid.define(words, most=2, cluster_gpus=None).blocks
    cells = [block.cell(s, 1, shape=(3, 8, 8), optimizer="sgd", devices="Test CPU") for s in block.strategies]
    assert [(c.strategy, c.gpus) for c in cells] == [("single", 1), ("ddp", 2)]


def test_curves_begin_at_the_begin_of_training():
    for draw in (drawing.accuracy, drawing.accuracy_over_time, drawing.loss):
        (axes,) = draw([("tiny", "ddp", 1.0, 20.0, 2.0, 2.1, 0.4)]).axes
        assert axes.get_xlim()[0] == 0 < axes.get_xlim()[1]


def test_figures_follow_from_results():
    fast = row("ddp")
    made = study(fast, target=0.4, price=3.6)
    f = study_figures.of(made)[0]
    assert f.samples_per_s == pytest.approx(64 / 0.62)
    assert f.epoch_s == pytest.approx(6400 / f.samples_per_s)
    assert f.target is not None
    assert f.target.epoch == 2.0, "the first point that has 40 %"
    assert f.cost_per_epoch == pytest.approx(3.6 * 2 * f.epoch_s / 3600)
    assert f.cost_of_run == pytest.approx(10 * f.cost_per_epoch)
    assert f.cost_to_target == pytest.approx(3.6 * 2 * 20.0 / 3600)
    screen = tables.plain(report.render(made), width=80)
    assert "costs: at 3.6 for a device and hour" in screen
    assert f"{f.cost_per_epoch:.3g}" in screen
    assert f"{f.cost_of_run:.3g}" in screen
    assert f"2 epochs, 20.0 s, cost {f.cost_to_target:.3g}" in screen
    first = tables.plain(report.render(study(fast, target=0.2)), width=80)
    assert "1 epoch, 10.0 s" in first
    assert "not reached" in tables.plain(report.render(study(fast, target=0.99)), width=80)
    assert "cost" not in tables.plain(report.render(study(fast)), width=80)


def test_more_ranks_than_are_here_are_predicted_for_the_cluster_of_the_study_or_refused():
    layers = study_grid.define(args("--study", "layers"), most=4, cluster_gpus=None)
    assert {b.cluster for b in layers.blocks if b.gpus == 8} == {"a100-nvlink-8"}
    grid = study_grid.define(args("--study", "grid", "--models", "cnn", "--gpus", "8"), most=4, cluster_gpus=None)
    assert [b.cluster for b in grid.blocks] == [None]
    seconds, basis = verb._estimate(one_call(args("--study", "grid")), grid.blocks[0], ("ddp",), set())
    assert (seconds, "name a cluster with --cluster" in basis) == (0.0, True)


def test_an_estimate_counts_every_training_of_its_own_and_its_start(monkeypatch):
    profile = nouns.profile()
    monkeypatch.setattr(verb.choose, "stored_local_profile", lambda *_: (profile, "profile tiny.json"))
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))

    def estimate(gpus, *strategies):
        words = args("--study", "grid", "--models", "tiny", "--data", "digits", "--gpus", gpus, "--epochs", "2",
                     "--strategies", ",".join(strategies))  # fmt: skip
        (block,) = study_grid.define(words, most=2, cluster_gpus=None).blocks
        return verb._estimate(one_call(words), block, block.strategies, set())[0]

    training = 2 * (1437 // 64) * verb.single_device_step_s(profile, 64)
    for gpus in ("1", "2"):
        assert estimate(gpus, "ddp", "fsdp", "ps_sync") == pytest.approx(3 * (training + verb._START_S))
    in_turns = estimate("2", "ddp", "fsdp")
    assert in_turns == pytest.approx((2 + 1 + 1.5) * training + verb._START_S)
    assert estimate("2", "ddp", "fsdp", "asa+replan") == pytest.approx(in_turns + training + verb._START_S)
    monkeypatch.setattr(verb.choose, "stored_local_profile", lambda *_: None)
    assert estimate("2", "ddp", "ps_sync") == pytest.approx(estimate("2", "ddp", "fsdp") + verb._START_S)


def test_what_was_published_stands_beside_the_same_cell():
    p = Published(strategy="ddp", model="", data="cifar10", hardware="RTX", gpus=2, metric="speedup_over_single",
                  value=1.3, source="a table")  # fmt: skip
    rows = (row("single", gpus=1), row("ddp"), row("tensor"))
    found = {f.row.cell.strategy: f for f in study_figures.of(study(*rows, published=(p,)))}
    assert found["ddp"].published == ((p, pytest.approx(1.0 / 0.62)),)
    assert not found["tensor"].published
    text = report.markdown(study(*rows, published=(p,)), study_figures.of(study(*rows, published=(p,))))
    assert text.count("model not named") == 2, "in the row and in the table of published figures"
    other = study(rows[1], published=(replace(p, gpus=4),))
    assert study_figures.unmatched(other, study_figures.of(other)) == [replace(p, gpus=4)]


def test_other_parameter_servers_are_compared_with_synchronous_ones_as_published_and_here():
    values = (("ps_sync", "vgg16", 100.0, 50.0), ("ps_async", "vgg16", 80.0, 45.0), ("ps_async", "cnn", 1.0, 1.0))
    published = tuple(
        Published(strategy=s, model=m, data="mnist", hardware="A10G", gpus=2, metric=metric, value=v, source="a table")
        for s, m, *pair in values
        for metric, v in zip(("training_time_s", "accuracy_percent"), pair, strict=True)
    )
    slower, faster = (replace(row(s), cell=cell(t)) for s, t in (("single", "ps_sync"), ("ddp", "ps_async")))
    crowded = [replace(r, cell=replace(r.cell, gpus=4), oversubscribed=True) for r in (faster, slower)]
    made = study(slower, faster, *crowded, replace(row(), cell=cell("downpour")), published=published)
    told, here = study_figures.against_synchronous(made, study_figures.of(made))
    assert told == ("published: ps_async against ps_sync: time -20.0 % (1 cells), accuracy -5.0 points (1 cells)"), (
        "a model without a synchronous figure counts for nothing"
    )
    of = {f.row.cell.strategy: f for f in study_figures.of(made)}
    change = 100 * (of["ps_async"].epoch_s / of["ps_sync"].epoch_s - 1)
    assert here.startswith(f"here: ps_async against ps_sync: time {change:+.1f} % (1 cells), accuracy ")
    assert here.endswith("(2 cells)"), "times of more ranks than cores compare nothing"
    assert here in report.markdown(made, study_figures.of(made))


def test_tables_hold_every_cell_and_escape_what_is_special(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "draw", lambda chart, folder: ([], f"<svg {chart.name} />"))  # drawn in the run below
    refused = StudyRow(cell=cell("fsdp", model="a_b|c"), state="refused", result=None, why="100 % & more_or|less")
    made = study(row("ddp"), refused, differs=("another GPU",))
    study_page.write(made, tmp_path)
    with (tmp_path / "study.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["strategy"], r["state"]) for r in rows] == [("ddp", "measured"), ("fsdp", "refused")]
    assert float(rows[0]["step_s"]) == 0.62
    assert rows[1]["why"] == "100 % & more_or|less"
    text = (tmp_path / "study.md").read_text()
    assert r"a_b\|c" in text
    assert "differs: another GPU" in text
    lines = [x for x in text.splitlines() if x.startswith("| ")][: len(rows) + 1]
    assert len({x.replace(r"\|", "").count("|") for x in lines}) == 1, "as many columns in every row"
    tex = (tmp_path / "study.tex").read_text()
    assert r"a\_b\textbar{}c" in tex
    assert "% refused (1): fsdp of a_b|c on 2: 100 % & more_or|less" in tex
    body = [x for x in tex.splitlines() if x.endswith(r" \\")]
    assert len({x.replace(r"\&", "").count("&") for x in body}) == 1
    html = (tmp_path / "report.html").read_text()
    assert "Samples per second over ranks" in html
    assert "100 % &amp; more_or|less" in html
    assert "refused (1)" in html
    assert "http" not in html
    screen = tables.plain(report.render(made), width=80)
    assert "refused (1): fsdp of a_b|c on 2: 100 % & more_or|less" in " ".join(screen.split())


def test_a_study_comes_back_from_its_file_and_does_only_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    block = study_grid.Block(
        model="tiny", data="digits", gpus=2, global_batch=64, seed=0, strategies=("ddp", "tensor", "fsdp", "hybrid"),
        epochs=(3,), mode="measured",
    )  # fmt: skip
    ended = row("hybrid", epochs=3)
    points = tuple(a for a in ended.result.accuracy if a.epoch < 2)
    rows = (
        row("ddp", epochs=3),
        StudyRow(cell=cell("fsdp", epochs=3), state="refused", result=None, why="no memory"),
        replace(ended, result=replace(ended.result, accuracy=points)),
    )
    codec.save(study(*rows), tmp_path / verb.FILE)
    kept = verb._stored_study(tmp_path)
    assert kept is not None
    found = {r.cell: r for r in kept.rows}
    assert found == {r.cell: r for r in rows}
    left = verb._open_strategies(one_call(args("--study", "grid", "--models", "tiny"), found), block)
    assert left == ("tensor", "fsdp", "hybrid"), "what has figures stays; refusals and runs cut short are tried again"
    another = one_call(args("--study", "grid"), found, name="Another CPU")
    assert verb._open_strategies(another, block) == block.strategies


def test_what_was_refused_takes_no_time_when_it_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    words = args("--study", "grid", "--models", "tiny", "--gpus", "2", "--data", "digits", "--strategies", "fsdp,ddp")
    definition = study_grid.define(words, most=2, cluster_gpus=None)
    (block,) = definition.blocks
    why = StudyRow(cell=cell("fsdp", epochs=1), state="refused", result=None, why="no memory")
    found = {why.cell: why}
    got: list[dict] = []
    monkeypatch.setattr(verb, "_estimate", lambda _this, _block, strategies, *_: (5.0 * len(strategies), "guessed"))
    console = SimpleNamespace(result=lambda data, parts: got.append(data))
    this = one_call(words, found, console=console, study=definition, folder=tmp_path)
    for strategies in (("fsdp", "ddp"), ("fsdp",), ()):
        verb._show_work(this, [(block, strategies)])
    assert [d["about_s"] for d in got] == [5.0, 0.0, 0.0]
    assert [d["blocks"][0]["how"] for d in got] == ["guessed", "refused before, and tried again", "done"]


@pytest.mark.parametrize("seed", range(20))
def test_epochs_asked_for_cut_a_run(seed):
    draw = random.Random(seed)
    points = tuple(
        AccuracyPoint(epoch=float(e), seconds=e, train_loss=1, validation_loss=1, validation_accuracy=0.5)
        for e in range(1, draw.randint(2, 9))
    )
    result = replace(nouns.bench().results[0], accuracy=points)
    asked = draw.randint(1, 10)
    kept = verb._until(result, asked).accuracy
    assert kept == tuple(a for a in points if a.epoch <= asked)


def test_a_runner_of_ones_own_takes_its_strategies_and_a_refusal_leaves_the_others(monkeypatch, tmp_path):
    block = study_grid.Block(
        model="tiny", data="digits", gpus=2, global_batch=8, seed=0, strategies=("ddp", "mine", "broken"), epochs=(1,),
        mode="measured",
    )  # fmt: skip
    result = nouns.bench().results[1]

    def broken(site, strategies):
        raise UsageError("cannot be had")

    monkeypatch.setattr(study_runners, "side_by_side", lambda site, names: dict.fromkeys(names, result))
    monkeypatch.setitem(study_runners.RUNNERS, "mine", lambda site, names: dict.fromkeys(names, result))
    monkeypatch.setitem(study_runners.RUNNERS, "broken", broken)
    site = study_runners.Site(
        block=block, args=args("--study", "grid"), console=None, device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    heard: dict = {}
    study_runners.run(site, heard.update)
    assert set(heard) == set(block.strategies)
    assert heard["broken"].why_not == "cannot be had"
    assert heard["mine"].step_time_s is not None


def block_of(strategies):
    return study_grid.Block(
        model="tiny", data="digits", gpus=2, global_batch=8, seed=0, strategies=strategies, epochs=(1,),
        mode="measured",
    )  # fmt: skip


def test_a_request_to_stop_ends_the_study_and_not_only_the_cell(monkeypatch, tmp_path):
    block = block_of(("ps_sync", "ps_async"))
    site = study_runners.Site(
        block=block, args=args("--study", "grid"), console=None, device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=100.0,
    )  # fmt: skip
    monkeypatch.setattr(study_runners.Site, "images", lambda site: (range(8), range(8)))
    monkeypatch.setattr(study_runners, "plan_of", lambda *_: nouns.plan())
    result, begun, heard = nouns.bench().results[1], [], {}

    def run(site, strategy, plan):
        begun.append(strategy)
        if saved:
            raise PreemptedError("everything is saved")
        monkeypatch.setattr(signals, "asked", True)  # the signal came when the ranks had nothing left to do
        return result

    monkeypatch.setattr(study_runners, "_run", run)
    for saved in (True, False):
        begun.clear()
        heard.clear()
        with pytest.raises(Terminated):
            study_runners.run(site, heard.update)
        assert begun == ["ps_sync"]
        assert heard == ({} if saved else {"ps_sync": result})


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Terminated(), WorkersFailedError("rank 1 died")])
def test_rounds_that_are_finished_are_kept_whatever_ends_a_comparison(ending, monkeypatch, tmp_path):
    def measured(plans, *_, on_message):
        cells = [Cell(p.strategy, steps=[0.5, 0.6, 0.7], turns=[[0.6, 0.6]]) for p in plans]
        on_message(0, {"round": 1, "rounds": 9, "cells": cells})
        raise ending

    monkeypatch.setattr(benchmark, "measure", measured)
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    monkeypatch.setattr(study_runners, "plan_of", lambda *_: nouns.plan("ddp"))
    words = args("--study", "grid", "--models", "tiny")
    site = study_runners.Site(
        block=block_of(("ddp",)), args=words, console=Console(), device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    heard: dict = {}
    with nullcontext() if isinstance(ending, WorkersFailedError) else pytest.raises(type(ending)):
        study_runners.run(site, heard.update)
    assert heard["ddp"].step_time_s.n == 3
    assert any("ended after round 1 of 9" in note for note in site.notes)
    rows: dict = {}
    verb._store_rows(one_call(words, rows), site.block, ("ddp",), heard, "")
    assert [(r.state, r.ended_early) for r in rows.values()] == [("measured", True)]
    assert verb._open_strategies(one_call(words, rows), site.block) == ("ddp",), "the same command runs it again"


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), PreemptedError("everything is saved")])
def test_epochs_that_are_finished_are_kept_if_a_training_is_stopped(ending, monkeypatch, tmp_path):
    def trained(*_, on_event, **__):
        on_event({"event": "epoch", "line": "", **codec.to_data(nouns.epoch(0))})
        raise ending

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asa.executor.running.run.train", trained)
    monkeypatch.setattr(study_runners.Site, "images", lambda _: (range(80), range(8)))
    monkeypatch.setattr(study_runners, "plan_of", lambda *_: nouns.plan("ps_sync"))
    site = study_runners.Site(
        block=replace(block_of(("ps_sync", "ps_async")), epochs=(1, 5)), args=args("--study", "grid"),
        console=Console(), device="cpu", profile=nouns.profile(), cluster=nouns.cluster(2), folder=tmp_path / "blocks",
        budget_s=1000.0,
    )  # fmt: skip
    heard: dict = {}
    with pytest.raises((KeyboardInterrupt, Terminated)):
        study_runners.run(site, heard.update)
    assert {s: [a.epoch for a in r.accuracy] for s, r in heard.items()} == {"ps_sync": [1.0]}


def test_a_training_of_its_own_has_the_wait_for_data_apart_as_turns_have(monkeypatch, tmp_path):
    """A step is one of computing and communicating in every row of a table; samples per second include the wait."""
    epochs = [replace(e, measurements=replace(e.measurements, mean_step_s=0.5, data_wait_s=0.3)) for e in
              (nouns.epoch(0), nouns.epoch(1))]  # fmt: skip
    monkeypatch.setattr(study_runners.Site, "images", lambda _: (range(80), range(8)))
    site = study_runners.Site(
        block=block_of(("asa", "asa+replan")), args=args("--study", "grid"), console=Console(), device="cpu",
        profile=nouns.profile(), cluster=nouns.cluster(2), folder=tmp_path, budget_s=1000.0,
    )  # fmt: skip
    found = study_runners._result(site, "asa+replan", nouns.plan(), epochs, [])
    assert (found.step_time_s.median, found.data_wait_s) == (0.5, 0.3)
    assert found.samples_per_s == pytest.approx(8 / 0.8)


@pytest.mark.parametrize(
    ("words", "rate"), [((), "0.1"), (("--lr", "0.02"), "0.02"), (("--optimizer", "adamw"), "0.001")]
)
def test_a_training_that_diverges_names_its_rate_and_the_option_that_lowers_it(words, rate, monkeypatch, tmp_path):
    def diverged(*_):
        raise WorkersFailedError(
            "the loss is no longer finite in epoch 0; lower the learning rate with --lr, or wait more"
        )

    monkeypatch.setattr(study_runners.Site, "images", lambda _: (range(80), range(8)))
    monkeypatch.setattr(study_runners, "plan_of", lambda *_: nouns.plan())
    monkeypatch.setattr(study_runners, "_run", diverged)
    site = study_runners.Site(
        block=block_of(("ps_async",)), args=args("--study", "grid", *words), console=None, device="cpu",
        profile=nouns.profile(), cluster=nouns.cluster(2), folder=tmp_path, budget_s=1000.0,
    )  # fmt: skip
    why = study_runners.train_each(site, ("ps_async",))["ps_async"].why_not
    assert f"; lower the learning rate of {rate} with --lr, or wait more" in why


def test_results_of_another_learning_rate_are_those_of_other_cells(tmp_path):
    def cells_of(*more):
        words = ("--study", "grid", "--models", "tiny", "--gpus", "1,64", "--strategies", "ddp", *more)
        defined = study_grid.define(args(*words), most=2, cluster_gpus=None)
        return [b.cell("ddp", 1, shape=(3, 8, 8), optimizer="sgd", devices="Test") for b in defined.blocks]

    usual, lower = cells_of(), cells_of("--lr", "0.01")
    assert [c.learning_rate for c in usual] == [None, None]
    assert [c.learning_rate for c in lower] == [0.01, None], "a prediction does not depend on it"
    rows = (row(), row(learning_rate=0.01))
    text = report.markdown(study(*rows), study_figures.of(study(*rows)))
    assert "| rate |" in text
    assert "| 10 | 0.01 |" in text
    assert "| rate |" not in report.markdown(study(rows[0]), study_figures.of(study(rows[0])))


def test_a_request_that_an_earlier_command_had_does_not_end_a_study(monkeypatch, tmp_path):
    block = block_of(("ps_sync", "ps_async"))
    monkeypatch.setattr(signals, "asked", True)
    monkeypatch.setattr(study_runners, "RUNNERS", {s: lambda *_: {} for s in block.strategies})
    ended = []
    site = study_runners.Site(
        block=block, args=args("--study", "grid"), console=None, device="cpu", profile=None, cluster=None,
        folder=tmp_path, budget_s=100.0,
    )  # fmt: skip
    study_runners.run(site, ended.append)
    assert ended == [{}, {}]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"precision": "bf16"}, "bf16"), ({"optimizer": "adamw"}, "adamw"), ({"input_shape": (3, 16, 16)}, "3x16x16"),
        ({"learning_rate": 0.02}, "0.02"), ({"classes": 7}, "7"), ({"memory_bytes": 2**31}, "2.00 GiB"),
        ({"alone": True}, "alone"), ({"strategy": "gpipe", "microbatches": 4}, "4"),
    ],
)  # fmt: skip
def test_no_table_or_figure_has_two_rows_that_cannot_be_told_apart(changes, shown):
    first, other = row(), row()
    if "strategy" in changes:
        first = replace(first, cell=cell("gpipe"))
    other = replace(other, cell=cell(**changes))
    made = study(first, other)
    rows = study_figures.of(made)
    indices, texts = report.columns(made, rows)
    heading = [report.TABLE_COLUMNS[i] for i in indices]
    key, other_key = ([row[i] for i in indices][: heading.index("state")] for row in texts)
    assert shown in {*key} ^ {*other_key}
    screen = [line.split() for line in tables.plain(report.render(made), width=80).splitlines()]
    assert any(shown in " ".join(words) for words in screen)
    assert len({(f.heading, f.strategy) for f in rows}) == len({f.variant for f in rows}) == 2
    for chart in study_page.charts(rows)[:-1]:
        assert len({r[:2] for r in chart.rows}) in (0, 2), chart.name
    plain = [study_figures.plain(f) for f in rows]
    last = study_figures.COLUMNS.index("state")
    assert plain[0][:last] != plain[1][:last]
    alike = study(replace(first, cell=other.cell))
    if not {"learning_rate", "classes", "memory_bytes", "microbatches"} & set(changes):
        assert not study_figures.of(alike)[0].settings, "what all rows have in common has no column"


class Made(list):
    source, num_classes = "made up", 10


def test_what_is_finished_is_stored_before_the_next_strategy_begins(monkeypatch, tmp_path):
    definition = study_grid.define(
        args("--study", "grid", "--models", "tiny", "--gpus", "2", "--strategies", "alone,ddp,other"),
        most=2, cluster_gpus=None,
    )  # fmt: skip
    (block,) = definition.blocks
    words = args("--study", "grid", "--models", "tiny")
    result = nouns.bench().results[1]

    def ended(site, strategies):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_runners, "side_by_side", lambda site, names: dict.fromkeys(names, result))
    monkeypatch.setitem(study_runners.RUNNERS, "alone", lambda site, names: dict.fromkeys(names, result))
    monkeypatch.setitem(study_runners.RUNNERS, "other", ended)
    monkeypatch.setattr(study_runners.Site, "images", lambda site: (Made(range(100)), Made()))
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    monkeypatch.setattr(
        verb, "_site",
        lambda *_: study_runners.Site(
            block=block, args=words, console=None, device="cpu", profile=nouns.profile(), cluster=nouns.cluster(2),
            folder=tmp_path, budget_s=1.0,
        ),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        verb._block(one_call(words, study=definition, folder=tmp_path), block, 1.0)
    kept = verb._stored_study(tmp_path)
    assert [(r.cell.strategy, r.state) for r in kept.rows] == [("alone", "measured"), ("ddp", "measured")]
    assert verb._open_strategies(one_call(words, {r.cell: r for r in kept.rows}), block) == ("other",)


def test_the_order_of_a_table_is_that_of_the_study_and_cells_of_another_process_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    words = args("--study", "grid", "--models", "tiny", "--gpus", "2", "--strategies", "ddp,tensor,fsdp", "--epochs",
                 "10", "--data", "digits")  # fmt: skip
    definition = study_grid.define(words, most=2, cluster_gpus=None)
    late, early, other = row("tensor"), row("ddp"), row("hybrid")
    gap = StudyRow(cell=cell("fsdp"), state="open", result=None, why="the budget is used up")
    codec.save(study(other, replace(row("ddp"), cell=cell("fsdp"))), tmp_path / verb.FILE)
    rows = {r.cell: r for r in (gap, late, early)}
    made = verb._write(one_call(words, rows, study=definition, folder=tmp_path))
    assert [(r.cell.strategy, r.state) for r in made.rows] == [
        ("ddp", "measured"), ("tensor", "measured"), ("fsdp", "measured"), ("hybrid", "measured"),
    ]  # fmt: skip
    assert verb._stored_study(tmp_path).rows == made.rows


def test_other_microbatches_than_asked_for_are_run_again(monkeypatch):
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    words = ("--study", "grid", "--models", "tiny", "--gpus", "2", "--strategies", "ddp,gpipe", "--epochs", "3",
             "--data", "digits")  # fmt: skip
    piped = replace(row("ddp"), cell=cell("gpipe", epochs=3, microbatches=2))
    rows = {r.cell: r for r in (row("ddp", epochs=3), piped)}
    for asked, left in (((), ("gpipe",)), (("--microbatches", "2"), ()), (("--microbatches", "4"), ("gpipe",))):
        given = args(*words, *asked)
        (block,) = study_grid.define(given, most=2, cluster_gpus=None).blocks
        assert verb._open_strategies(one_call(given, rows), block) == left, "one number serves no other request"


@pytest.mark.parametrize("more", [("--classes", "7"), ("--memory", "2GiB"), ("--strategies", "ddp,ps_sync")])
def test_cells_differ_in_whatever_changes_their_results(more, monkeypatch, tmp_path):
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    words = ("--study", "grid", "--models", "tiny", "--gpus", "2", "--data", "digits", "--strategies", "ddp")
    (usual,), (changed,) = (
        study_grid.define(args(*words, *w), most=2, cluster_gpus=None).blocks for w in ((), more)
    )  # fmt: skip
    before = verb._cells(one_call(args(*words)), usual, "ddp")
    assert before == [cell("ddp", epochs=1)], "cells of older files have none of the newer fields"
    codec.save(study(*(replace(row(), cell=c) for c in before)), tmp_path / verb.FILE)
    rows = {r.cell: r for r in verb._stored_study(tmp_path).rows}
    assert verb._open_strategies(one_call(args(*words), rows), usual) == ()
    assert "ddp" in verb._open_strategies(one_call(args(*words, *more), rows), changed)


def test_a_training_of_its_own_says_how_its_pipeline_ran(tmp_path, monkeypatch):
    site = study_runners.Site(
        block=block_of(("gpipe",)), args=args("--study", "grid"), console=None, device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    monkeypatch.setattr(study_runners.Site, "images", lambda _: (range(80), range(8)))
    piped = staged(training.plan(ranks=2), [1, 1], microbatches=4)
    made = study_runners._result(site, "gpipe", piped, [nouns.epoch()], [])
    assert (made.schedule, made.num_microbatches) == (piped.schedule, 4)
    whole = study_runners._result(site, "ddp", nouns.plan(), [nouns.epoch()], [])
    assert (whole.schedule, whole.num_microbatches) == (None, None)


def test_training_that_the_budget_is_too_short_for_is_left_and_not_refused(tmp_path, monkeypatch):
    block = study_grid.Block(
        model="tiny", data="digits", gpus=2, global_batch=8, seed=0, strategies=("asa+replan",), epochs=(10,),
        mode="measured",
    )  # fmt: skip
    words = args("--study", "grid", "--models", "tiny", "--input", "3x8x8")
    site = study_runners.Site(
        block=block, args=words, console=None, device="cpu", profile=nouns.profile(), cluster=nouns.cluster(2),
        folder=tmp_path, budget_s=0.2,
    )  # fmt: skip
    monkeypatch.setattr(study_runners.Site, "images", lambda site: (range(1437), range(360)))
    found = study_runners.train_each(site, block.strategies)
    rows: dict = {}
    monkeypatch.setattr(verb, "_shape", lambda block, args: (3, 8, 8))
    verb._store_rows(one_call(words, rows), block, block.strategies, found, "")
    (only,) = rows.values()
    assert only.state == "open"
    assert " and 200 ms of --budget are left for it" in only.why
    text = "\n".join(report.folded(study(only)))
    assert "left (1): asa+replan" in text
    assert "refused" not in text
    # Figures of a run that ended early stay where there is no time for another one.
    rows = {only.cell: replace(only, state="measured", result=row().result)}
    verb._store_rows(one_call(words, rows), block, block.strategies, None, "the budget is used up")
    assert [r.state for r in rows.values()] == ["measured"]


def test_predictions_take_no_share_of_the_time_for_measuring():
    blocks = study_grid.define(args("--study", "pipeline"), most=4, cluster_gpus=None).blocks
    work = [(b, b.strategies) for b in blocks]
    assert [b.mode for b in blocks] == ["measured"] * 3 + ["predicted"] * 2
    assert verb._budget_share(300.0, work) == pytest.approx((300 - 2 * 5) / 3)


def test_predictions_are_made_even_if_measuring_took_all_of_the_time(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    clock = [0.0]
    monkeypatch.setattr(verb, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(verb, "_local_devices", lambda _: ("cpu", 2))
    monkeypatch.setattr(verb, "_device_name", lambda _: "Test CPU")
    monkeypatch.setattr(verb, "_check", lambda *_: None)
    ran = []

    def block(_, block, _share_s):
        ran.append(block.mode)
        clock[0] += 1000.0 if block.mode == "measured" else 1.0

    monkeypatch.setattr(verb, "_block", block)
    console = SimpleNamespace(say=lambda _: None, result=lambda *_: None)
    verb.run(args("--study", "pipeline", "--budget", "5s"), console)
    assert ran == ["measured", "predicted", "predicted", "predicted"]


def test_accuracy_at_chance_is_shown_as_a_loss():
    at = row()
    point = replace(at.result.accuracy[-1], validation_accuracy=0.15, validation_loss=2.31)
    guessed = replace(at, result=replace(at.result, accuracy=(point,)), num_classes=10)
    known = study_figures.of(study(guessed))[0].learnt
    assert known.startswith("loss 2.31")
    assert study_figures.of(study(replace(guessed, num_classes=100)))[0].learnt.startswith("15")


def test_a_run_that_diverged_is_named_and_is_not_among_the_learnt(tmp_path):
    at = row()
    point = replace(at.result.accuracy[-1], validation_accuracy=0.1, train_loss=2e6, validation_loss=2e6)
    lost = replace(at, result=replace(at.result, accuracy=(point,)), num_classes=10)
    (figures,) = study_figures.of(study(lost))
    assert figures.learnt.startswith("diverged")
    assert "2e+06" not in figures.learnt
    assert figures.accuracy is None, "an accuracy of guessing is compared with nothing"
    text = "\n".join(report.folded(study(lost)))
    assert "diverged (1): " in text
    assert "try a lower --lr" in text
    drawn = {c.name: c.rows for c in study_page.charts([figures])}
    assert not drawn["loss"], "one of a million would flatten the others"
    assert not drawn["accuracy"]
    # Only the statistics of BatchNorm are of too few steps: training itself went well.
    (early,) = study_figures.of(
        study(replace(lost, result=replace(at.result, accuracy=(replace(point, train_loss=2.2),))))
    )
    assert early.learnt.startswith("training loss 2.2")
    assert not early.diverged


@pytest.mark.parametrize(("classes", "guessed", "learnt"), [(2, 0.55, 0.9), (10, 0.2, 0.25), (100, 0.02, 0.03)])
def test_an_accuracy_of_few_classes_can_be_shown(classes, guessed, learnt):
    at = row()
    for accuracy, shown in ((guessed, None), (learnt, learnt)):
        point = replace(at.result.accuracy[-1], validation_accuracy=accuracy, train_loss=0.7)
        known = replace(at, result=replace(at.result, accuracy=(point,)), num_classes=classes)
        (figures,) = study_figures.of(study(known))
        assert figures.accuracy == shown
        assert study_figures.plain(figures)[study_figures.COLUMNS.index("validation_accuracy")] == shown


def test_what_is_left_is_one_list():
    at = row()
    early = replace(at, cell=replace(at.cell, epochs=50))
    waiting = replace(
        at, cell=replace(at.cell, strategy="tensor"), state="open", result=None, why="the budget is used up"
    )
    lines = [text for text in report.folded(study(early, waiting)) if "budget" in text]
    assert len(lines) == 1
    assert lines[0].startswith("left (2): ")
    assert lines[0].count("the same command") == 1


def test_a_shorter_run_does_not_replace_a_longer_one(monkeypatch):
    at = row()
    block = study_grid.Block(
        model="tiny", data="digits", gpus=1, global_batch=8, seed=0, strategies=("single",), epochs=(50,),
        mode="measured",
    )  # fmt: skip
    words = args("--study", "grid", "--models", "tiny", "--input", "3x8x8")
    monkeypatch.setattr(verb, "_shape", lambda block, args: (3, 8, 8))
    rows: dict = {}
    for epoch, kept in ((3.0, 3.0), (2.0, 3.0), (4.0, 4.0)):
        point = replace(at.result.accuracy[-1], epoch=epoch)
        found = {"single": replace(at.result, strategy="single", accuracy=(point,))}
        verb._store_rows(one_call(words, rows), block, block.strategies, found, "")
        (only,) = rows.values()
        assert only.result.accuracy[-1].epoch == kept


def test_on_one_device_data_parallelism_is_the_single_device(tmp_path):
    block = study_grid.Block(
        model="tiny", data="digits", gpus=1, global_batch=8, seed=0, strategies=("single", "fsdp"), epochs=(1,),
        mode="measured",
    )  # fmt: skip
    site = study_runners.Site(
        block=block, args=args("--study", "grid"), console=None, device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    assert study_runners.plan_of(site, "fsdp").conduct == study_runners.plan_of(site, "single").conduct
    assert offered()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    codec.save(nouns.cluster(2), folder / "profiles" / "cluster.box.json")
    small = ("--input", "1x8x8", "--classes", "10", "--global-batch", "479", "--max-tensor-degree", "1")
    asa("profile", "logistic", *small, "--device", "cpu", "--time-limit", "1s", cwd=folder)
    return folder


GRID = ("bench", "--study", "grid", "--models", "logistic", "--input", "1x8x8", "--classes", "10", "--data", "digits",
        "--gpus", "1,2", "--global-batch", "479", "--strategies", "single,ddp,asa+replan,interleaved",
        "--epochs", "1", "--device", "cpu", "--cluster", "box", "--out", "out", "--budget", "100s")  # fmt: skip


def test_figures_of_a_study_are_drawn_from_its_rows():
    rows = study_figures.of(study(row("ddp"), row("tensor"), row("asa", gpus=4)))
    drawn = {c.name: c.draw(c.rows) for c in study_page.charts(rows) if c.name in ("throughput", "accuracy_time")}
    marks = sorted(line.get_xydata().tolist() for line in drawn["throughput"].axes[0].lines)
    assert marks == [[[2.0, 64 / 0.71]], [[2.0, 64 / 0.62]], [[4.0, 128.0]]]
    times = drawn["accuracy_time"].axes[0].lines[0].get_xydata().tolist()
    assert times == [[10.0, 30.0], [20.0, 45.0], [30.0, 52.0]]


def test_axes_of_a_study_show_plain_numbers_and_accuracy_from_zero():
    rows = study_figures.of(study(row("ddp"), row("tensor"), row("asa", gpus=4)))
    drawn = {c.name: c.draw(c.rows) for c in study_page.charts(rows)}
    throughput, accuracy, scatter = (drawn[n].axes[0] for n in ("throughput", "accuracy", "predicted_measured"))
    assert throughput.get_ylim()[0] == 0
    assert throughput.get_ylim()[1] > 1.03 * max(y for line in throughput.lines for y in line.get_ydata())
    assert accuracy.get_ylim()[0] == 0
    for narrow in ((0.21, 0.33), (6300.0, 8100.0)):
        scatter.set_ylim(*narrow)
        shown = [t for t in scatter.yaxis.get_majorticklocs() if narrow[0] <= t <= narrow[1]]
        texts = [scatter.yaxis.get_major_formatter()(t, 0) for t in shown]
        assert texts == [f"{t:g}" for t in shown] != []


def test_a_strategy_on_several_numbers_of_ranks_has_one_mark_in_the_scatter():
    rows = study_figures.of(study(row("ddp"), row("ddp", gpus=4), row("tensor")))
    axes = next(c.draw(c.rows) for c in study_page.charts(rows) if c.name == "predicted_measured").axes[0]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["ddp", "tensor"]
    marks = {(line.get_label(), line.get_marker()) for line in axes.lines if line.get_marker() not in ("None", "")}
    assert len(marks) == 2


def test_no_strategy_is_called_fastest_on_more_ranks_than_cores():
    few, many = row("ddp"), replace(row("tensor", gpus=4), oversubscribed=True)
    slow = replace(few.result, samples_per_s=1.0)
    made = study(replace(few, result=slow), many)
    assert "ddp on 2 ranks" in study_page.first_sentence(made, study_figures.of(made))


def test_no_strategy_is_called_fastest_on_a_busy_machine():
    note = "cnn, digits, 2 ranks, batch 64: " + verdicts.busy_note(1.5, 2, 2)
    made = study(replace(row("ddp"), notes=(note,)), replace(row("tensor"), notes=(note,)))
    said = study_page.first_sentence(made, study_figures.of(made))
    assert "Most samples" not in said
    assert "2 measured on a busy machine are not compared" in said


def test_a_tiny_study_is_foreseen_run_resumed_and_tabled(place, monkeypatch):
    monkeypatch.setattr(page, "draw", lambda chart, folder: ([], f"<svg {chart.name} />"))
    foreseen = json.loads(asa(*GRID, "--dry-run", "--json", cwd=place).stdout)
    assert [b["mode"] for b in foreseen["blocks"]] == ["measured", "measured"]
    assert foreseen["about_s"] > 0
    assert not (place / "out").exists()
    made = codec.loads(Study, asa(*GRID, "--json", cwd=place).stdout, source="stdout")
    states = {(r.cell.strategy, r.cell.gpus, r.cell.epochs): r.state for r in made.rows}
    assert states == {
        (s, n, e): "refused" if s == "interleaved" else "measured"
        for n, strategies in ((1, ("single", "ddp")), (2, ("ddp", "asa+replan", "interleaved")))
        for s in strategies
        for e in (1,)
    }
    ddp = next(r for r in made.rows if r.cell.strategy == "ddp" and r.cell.gpus == 2 and r.result)
    assert ddp.samples_per_epoch == 1437
    assert ddp.result.data_wait_s is not None
    assert ddp.result.samples_per_s == pytest.approx(479 / (ddp.result.step_time_s.median + ddp.result.data_wait_s))
    used = {(r.cell.strategy, r.cell.gpus): r.result.utilisation for r in made.rows if r.state == "measured"}
    assert all(share is not None and 0 < share <= 1 for share in used.values()), used
    assert 0 < ddp.result.state_memory_bytes <= ddp.result.peak_memory_bytes
    refused = next(r for r in made.rows if r.state == "refused")
    assert "interleaved is not built yet" in refused.why
    for name in ("study.csv", "study.md", "study.tex", "report.html", "study.json"):
        assert (place / "out" / name).is_file()
    again = asa(*GRID, "--strategies", "single,ddp", cwd=place)
    assert "of 2)" not in again.stderr, "nothing is run twice"
    assert len(codec.load(Study, place / "out" / "study.json").rows) == len(made.rows), "one table"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--strategies", "ddpp"), 2, "no strategy 'ddpp'; did you mean ddp?; one of asa,"),
        (("--microbatches", "3"), 2, "a batch of 64 is not cut into 3 microbatches; take a power of two up to it"),
        (("--data", "folder:nowhere"), 3, "--data folder:nowhere: there is no folder nowhere"),
        (
            ("--gpus", "1,1000000000"),
            2,
            "1000000000 devices are more than any cluster has; the most is 16384",
        ),
        (("--models", "cnnn"), 2, "no model is called 'cnnn'; did you mean cnn?"),
    ],
)
def test_what_no_cell_could_do_is_refused_before_anything_is_measured(tmp_path, words, code, said):
    assert said in asa("bench", "--study", "layers", "--dry-run", *words, cwd=tmp_path, code=code).stderr
    assert not list(tmp_path.iterdir())


def test_strategies_that_train_alone_have_what_is_left_of_the_budget_one_after_another(monkeypatch, tmp_path):
    words = args("--study", "grid", "--models", "tiny", "--strategies", "ps_sync,ps_async,ps_bounded", "--gpus", "2")
    (block,) = study_grid.define(words, most=4, cluster_gpus=None).blocks
    clock, left = [0.0], []
    monkeypatch.setattr(study_runners.time, "monotonic", lambda: clock[0])

    def trained(site, strategies):
        left.append(site.budget_s)
        clock[0] += 70.0
        return {}

    for strategy in block.strategies:
        monkeypatch.setitem(study_runners.RUNNERS, strategy, trained)
    site = study_runners.Site(
        block=block, args=words, console=None, device="cpu", profile=nouns.profile(), cluster=nouns.cluster(2),
        folder=tmp_path, budget_s=100.0,
    )  # fmt: skip
    study_runners.run(site, lambda _: None)
    assert left == [100.0, 30.0, 0.0], "a third each would let none of them run, however often the command is given"


def test_a_batch_larger_than_the_data_is_refused_before_the_model_is_profiled(tmp_path):
    words = ("--models", "logistic", "--data", "digits", "--gpus", "1", "--global-batch", "2000", "--strategies",
             "single", "--epochs", "1", "--json", "--out", "out")  # fmt: skip
    made = json.loads(asa("bench", "--study", "grid", *words, cwd=tmp_path).stdout)
    assert "a global batch of 2000 is larger than the 1437 training samples of digits" in made["rows"][0]["why"]
    assert not (tmp_path / "profiles").exists()


def test_what_is_compared_with_workers_that_do_not_wait_is_measured_like_them(tmp_path, monkeypatch):
    words = args("--study", "grid", "--models", "tiny", "--strategies", "ddp,ps_async", "--gpus", "2")
    (block,) = study_grid.define(words, most=4, cluster_gpus=None).blocks
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(study_runners, "train_each", lambda site, names: ran.append(tuple(names)) or {})
    monkeypatch.setitem(study_runners.RUNNERS, "ps_async", lambda site, names: ran.append(tuple(names)) or {})
    site = study_runners.Site(
        block=block.with_strategies(["ddp"]), args=words, console=None, device="cpu", profile=nouns.profile(),
        cluster=nouns.cluster(2), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    study_runners.run(site, lambda _: None)
    assert ran == [("ddp",)], "also where it is the only one left to do"
    (turns,) = study_grid.define(
        args("--study", "grid", "--models", "tiny", "--strategies", "ddp,single"), most=2, cluster_gpus=None
    ).blocks
    assert not turns.trains_separately


def test_a_table_tells_seeds_apart_and_shows_the_age_of_gradients_at_servers():
    ages = (2, 0, 6)
    assert study_runners._ages([{"ages": {"0": 1, "2": 4}}, {"ages": {"2": 2, "0": 1}}]) == ages
    assert study_runners._ages([]) == ()
    first = row("ddp")
    served = replace(first, result=replace(first.result, ages=ages), cell=cell("ps_async", seed=1))

    def table_of(*rows: StudyRow) -> list[list[str]]:
        made = study(*rows)
        lines = report.markdown(made, study_figures.of(made)).splitlines()
        return [[c.strip() for c in x.strip("|").split("|")] for x in lines if x.startswith("| ")]

    heading, plain, late = table_of(first, served)
    assert [plain[heading.index("seed")], late[heading.index("seed")]] == ["0", "1"]
    assert late[heading.index("age of gradients")] == "1.5 (most 2)"
    figures = dict(zip(study_figures.COLUMNS, study_figures.plain(study_figures.of(study(served))[0]), strict=True))
    assert (figures["mean_age"], figures["most_age"]) == (1.5, 2)
    assert {"seed", "age of gradients"}.isdisjoint(table_of(first)[0])


def test_a_speed_up_is_found_whatever_way_both_were_measured():
    p = Published(strategy="ps_async", model="", data="digits", hardware="RTX", gpus=2, metric="speedup_over_single",
                  value=1.3, source="a table")  # fmt: skip
    alone, turns = (replace(row("single"), cell=cell("single", gpus=1, alone=way)) for way in (True, False))
    served = replace(row("ddp"), cell=cell("ps_async"))
    piped = replace(row("ddp"), cell=cell("gpipe", microbatches=4))
    for single in (alone, turns):
        made = study(single, served, piped, published=(p, replace(p, strategy="gpipe")))
        found = {f.row.cell.strategy: f.published for f in study_figures.of(made)}
        assert [value for s in ("ps_async", "gpipe") for _, value in found[s]] == 2 * [pytest.approx(1.0 / 0.62)]
    slower = replace(turns, result=replace(turns.result, step_time_s=nouns.stat(9.0, 30)))
    made = study(slower, alone, served, published=(p,))
    ((_, value),) = next(f.published for f in study_figures.of(made) if f.published)
    assert value == pytest.approx(1.0 / 0.62), "what was measured in the same way comes first"


def test_a_reason_of_several_lines_and_signs_of_markup_stay_in_their_place():
    refused = StudyRow(cell=cell("fsdp", model="a<b>"), state="refused", result=None, why="first line\n  second & more")
    made = study(row("ddp"), refused)
    rows = study_figures.of(made)
    tex, text = report.latex(made, rows), report.markdown(made, rows)
    assert r"a\textless{}b\textgreater{}" in tex
    assert "% refused (1): fsdp of a<b> on 2: first line second & more" in tex
    assert "- refused (1): fsdp of a&lt;b> on 2: first line second & more" in text
    assert "<" not in text
    assert not [line for line in (*tex.splitlines(), *text.splitlines()) if line.strip().startswith("second")]


def test_a_training_of_its_own_on_a_busy_machine_is_named(monkeypatch, tmp_path):
    def trained(*_, on_event, **__):
        unknown = {**codec.to_data(nouns.epoch(0)), "validation_loss": None, "validation_accuracy": None}
        on_event({"event": "epoch", "line": "", **unknown})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asa.executor.running.run.train", trained)
    monkeypatch.setattr("asa.instruments.other_load.watching", lambda: nullcontext(SimpleNamespace(cores=1.5)))
    monkeypatch.setattr("asa.launch.usable_cores", lambda: 2)
    monkeypatch.setattr(study_runners.Site, "images", lambda _: (range(80), range(8)))
    monkeypatch.setattr(study_runners, "plan_of", lambda *_: nouns.plan("ps_sync"))
    site = study_runners.Site(
        block=block_of(("ps_sync",)), args=args("--study", "grid"), console=Console(), device="cpu",
        profile=nouns.profile(), cluster=nouns.cluster(2), folder=tmp_path / "blocks", budget_s=1000.0,
    )  # fmt: skip
    found = study_runners.train_each(site, ("ps_sync",))["ps_sync"]
    assert site.notes[-1] == f"{site.block.title}: ps_sync: {verdicts.busy_note(1.5, 2, 2)}"
    assert study_figures.busy(replace(row("ddp"), notes=tuple(site.notes)))
    assert found.accuracy[-1].validation_loss is None, "what is unknown is no loss of 0"


def test_a_busy_machine_is_said_of_the_strategy_that_it_disturbed(monkeypatch, tmp_path):
    words = args("--study", "grid", "--models", "tiny", "--gpus", "2", "--strategies", "loud,calm")
    (block,) = study_grid.define(words, most=2, cluster_gpus=None).blocks
    result = nouns.bench().results[1]

    def loud(site, strategies):
        site.notes.append(f"loud: {verdicts.busy_note(1.5, 2, 2)}")
        return dict.fromkeys(strategies, result)

    monkeypatch.setitem(study_runners.RUNNERS, "loud", loud)
    monkeypatch.setitem(study_runners.RUNNERS, "calm", lambda site, names: dict.fromkeys(names, result))
    monkeypatch.setattr(study_runners.Site, "images", lambda site: (Made(range(100)), Made()))
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 8, 8))
    monkeypatch.setattr(
        verb, "_site",
        lambda *_: study_runners.Site(
            block=block, args=words, console=None, device="cpu", profile=nouns.profile(), cluster=nouns.cluster(2),
            folder=tmp_path, budget_s=1.0,
        ),
    )  # fmt: skip
    monkeypatch.setattr(verb, "_write", lambda _: None)
    rows: dict = {}
    verb._block(one_call(words, rows, folder=tmp_path), block, 1.0)
    assert {r.cell.strategy: study_figures.busy(r) for r in rows.values()} == {"loud": True, "calm": False}


def test_parameter_servers_on_a_busy_machine_are_not_compared():
    note = verdicts.busy_note(1.5, 2, 2)
    values = (("ps_sync", 100.0), ("ps_async", 80.0))
    published = tuple(
        Published(strategy=s, model="tiny", data="mnist", hardware="A10G", gpus=2, metric="training_time_s", value=v,
                  source="a table") for s, v in values
    )  # fmt: skip
    for notes, said in (((), 2), ((note,), 1)):
        pair = [replace(row("ddp"), cell=cell(s), notes=notes) for s, _ in values]
        pair = [replace(r, result=replace(r.result, accuracy=())) for r in pair]
        made = study(*pair, published=published)
        assert len([x for x in study_figures.against_synchronous(made, study_figures.of(made)) if "time" in x]) == said


def test_a_prediction_tells_the_state_of_a_rank_apart_from_its_activations(tmp_path):
    block = study_grid.Block(
        model="tiny", data="digits", gpus=4, global_batch=8, seed=0, strategies=("ddp", "fsdp"), epochs=(1,),
        mode="predicted", cluster="box",
    )  # fmt: skip
    profile = nouns.profile()
    site = study_runners.Site(
        block=block, args=args("--study", "grid"), console=None, device="cpu", profile=profile,
        cluster=nouns.cluster(4), folder=tmp_path, budget_s=1.0,
    )  # fmt: skip
    ddp, fsdp = (study_runners.predicted_result(site, s) for s in block.strategies)
    weights = sum(c.parameter_bytes for c in profile.graph.components)
    assert ddp.state_memory_bytes == pytest.approx(3 * weights, rel=0.05), "weights, gradients, momentum"
    assert fsdp.state_memory_bytes < ddp.state_memory_bytes / 3
    assert ddp.state_memory_bytes < ddp.predicted_memory_bytes


def test_a_dry_run_counts_the_samples_that_are_there_and_foresees_refusals(monkeypatch, tmp_path):
    monkeypatch.setattr(verb.choose, "stored_local_profile", lambda *_: (nouns.profile(), "profile tiny.json"))
    monkeypatch.setattr(verb, "_shape", lambda *_: (3, 32, 32))
    (tmp_path / "one.csv").write_text("a,label\n" + "1,0\n" * 20)

    def estimate(data):
        words = args("--study", "grid", "--models", "tiny", "--data", data, "--gpus", "2", "--strategies", "ps_sync")
        (block,) = study_grid.define(words, most=2, cluster_gpus=None).blocks
        return verb._estimate(one_call(words), block, block.strategies, set())

    made_up = 5000 // 64 * verb.single_device_step_s(nouns.profile(), 64)
    assert estimate("cifar10")[0] == pytest.approx(made_up + verb._START_S), "there are no 50,000 here"
    seconds, basis = estimate(f"csv:{tmp_path}/one.csv")
    assert (seconds, basis.startswith("refused: --data csv:")) == (0.0, True)


def test_figures_of_a_study_show_speed_up_and_communication():
    single = replace(row("single"), cell=cell("single", gpus=1))
    crowded = replace(row("tensor", gpus=4), oversubscribed=True)
    foreseen = replace(row("asa"), state="predicted", cell=cell("asa", mode="predicted", devices="eight GPUs"))
    rows = study_figures.of(study(single, row("ddp"), crowded, foreseen))
    drawn = {c.name: c for c in study_page.charts(rows)}
    ratios = {r[1]: r[5:] for r in drawn["speedup"].rows}
    assert ratios.keys() == {"ddp", "tensor"}, "the prediction has no single device of its kind beside it"
    assert ratios["ddp"][1] == pytest.approx(1.0 / 0.62)
    assert ratios["tensor"][1] is None, "more ranks than cores"
    assert ratios["tensor"][0] == pytest.approx(0.95 / (0.71 * 1.01))
    assert [r[1:3] for r in drawn["communication"].rows][1] == ("ddp", pytest.approx(0.9 * 0.62))
    for name in ("speedup", "communication"):
        drawn[name].draw(drawn[name].rows)


def test_rows_of_tables_set_the_input_of_a_study_each_its_own(tmp_path):
    for columns in (2, 3):
        line = ",".join("1234"[:columns])
        head = ",".join("abcd"[:columns])
        (tmp_path / f"{columns}.csv").write_text(f"{head},label\n" + f"{line},0\n{line},1\n" * 20)
    data = ",".join(f"csv:{tmp_path}/{columns}.csv" for columns in (2, 3))
    words = args("--study", "grid", "--models", "logistic", "--data", f"{data},digits", "--gpus", "1")
    blocks = study_grid.define(words, most=2, cluster_gpus=None).blocks
    assert [verb._shape(b, words) for b in blocks] == [(1, 1, 2), (1, 1, 3), (3, 32, 32)]
    assert [verb._block_arguments(words, b).input for b in blocks] == [(1, 1, 2), (1, 1, 3), None]
    asked = args("--study", "grid", "--models", "logistic", "--data", data, "--gpus", "1", "--input", "3x8x8")
    for block in study_grid.define(asked, most=2, cluster_gpus=None).blocks:
        assert verb._shape(block, asked) == verb._block_arguments(asked, block).input == (3, 8, 8)


def test_predicted_parameter_servers_are_compared_with_synchronous_ones_too():
    published = tuple(
        Published(strategy=s, model="tiny", data="mnist", hardware="A10G", gpus=2, metric="training_time_s", value=v,
                  source="a table") for s, v in (("ps_sync", 100.0), ("ps_async", 80.0))
    )  # fmt: skip
    foreseen = [
        replace(row("ddp"), state="predicted", cell=cell(s, mode="predicted", devices="a10g-pcie-4"),
                result=replace(row("ddp").result, step_time_s=None, why_not="predicted", predicted_step_time_s=t,
                               accuracy=()))
        for s, t in (("ps_sync", 1.0), ("ps_async", 0.9))
    ]  # fmt: skip
    made = study(*foreseen, published=published)
    told = study_figures.against_synchronous(made, study_figures.of(made))
    assert told[1] == "predicted: ps_async against ps_sync: time -10.0 % (1 cells)"
