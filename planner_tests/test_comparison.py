"""``asa bench`` runs no more strategies side by side than fit into memory, and says which it left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import nouns
import pytest
import torch

from asa.cli import bench_setup, emulated
from asa.cli.commands import bench as verb
from asa.cli.commands.bench import VERBS, take_single_values
from asa.cli.comparison import (
    FILLED,
    ModelBench,
    leave_out_rare,
    measure,
    notes,
    prepare,
    results,
    settings,
    side_by_side,
)
from asa.cli.console import Console
from asa.cli.settings import arguments
from asa.errors import UsageError
from asa.executor.measuring import benchmark
from asa.executor.measuring.benchmark import Cell
from asa.ir import codec
from asa.ir.bench import AccuracyPoint
from asa.ir.consistency import parse
from asa.ir.plan import Plan
from asa.report.pages import bench as page
from asa.report.text.bench import clear_communication, near_chance
from asa.zoo.data import ImageSet


def _plan(strategy: str, step_s: float, each: int, microbatches: int) -> Plan:
    made = nouns.plan(strategy)
    prediction = replace(
        made.prediction, step_time_s=step_s, step_time_low_s=step_s, step_time_high_s=step_s,
        memory_bytes_per_rank=(each, each // 2),
    )  # fmt: skip
    return replace(made, num_microbatches=microbatches, prediction=prediction)


def _contest() -> ModelBench:
    contest = ModelBench(model="cnn", profile=nouns.profile(), cluster=nouns.cluster(2))
    contest.plans = {
        "single": _plan("single", 4.0, 100, 1),
        "ddp": _plan("ddp", 3.0, 300, 2),
        "hybrid": _plan("hybrid", 2.0, 200, 4),
        "tensor": _plan("tensor", 2.0, 200, 4),
        "asa": _plan("asa", 1.0, 100, 8),
    }
    return contest


def test_all_run_where_all_fit():
    contest = _contest()
    plans = side_by_side(contest, 10_000, shared=True)
    assert [p.strategy for p in plans] == ["asa", "hybrid", "ddp", "single"], "the fastest first; one plan is run once"
    assert not contest.why_not


def test_what_does_not_fit_is_left_out_and_named_under_all_its_names():
    contest = _contest()
    free = round((450 + 150 + 150) / FILLED) + 1  # ddp, the choice, and the smallest of the others
    plans = side_by_side(contest, free, shared=True)
    assert [p.strategy for p in plans] == ["asa", "ddp", "single"]
    assert set(contest.plans) == {"asa", "ddp", "single"}
    assert set(contest.why_not) == {"hybrid", "tensor"}
    assert "--strategies" in contest.why_not["tensor"]


def test_every_turn_has_an_exchange_of_every_plan_or_the_plan_is_left_out():
    contest = _contest()
    contest.plans = {
        text: replace(_plan(text, 1.0 + i, 100, 1), consistency=parse(text))
        for i, text in enumerate(("local_sgd:period=6", "diloco:period=50", "diloco:period=65", "local_sgd:growth=5"))
    }
    leave_out_rare(contest, 0.1)
    assert set(contest.plans) == {"local_sgd:period=6", "diloco:period=50"}
    assert "its workers exchange every 65 steps" in contest.why_not["diloco:period=65"]
    assert "its workers exchange every 2500 steps" in contest.why_not["local_sgd:growth=5"]
    plans = list(contest.plans.values())
    assert [benchmark.turn_steps(p) for p in (plans, plans[:1], [nouns.plan("ddp")])] == [50, 6, 1]


@pytest.mark.parametrize(("count", "told"), [(3, False), (5, False), (6, True)])
def test_communication_has_an_interval_only_of_enough_pairs(count, told):
    contest = _contest()
    cell = Cell("asa")
    cell.steps, cell.communication = [1.0] * 9, [0.1] * count
    contest.plans, contest.cells["asa"] = {"asa": contest.plans["asa"]}, cell
    (result,) = (r for r in results(SimpleNamespace(global_batch=64), contest) if r.strategy == "asa")
    assert (result.communication_low_s is not None, clear_communication(result, None)) == (told, told)


def test_devices_of_their_own_hold_their_own_ranks_alone():
    contest = _contest()
    plans = side_by_side(contest, round((300 + 100 + 200) / FILLED) + 1, shared=False)
    assert [p.strategy for p in plans] == ["asa", "hybrid", "ddp"]
    assert set(contest.why_not) == {"single"}


def test_chance_is_that_of_the_classes_of_the_data():
    contest = _contest()
    args = SimpleNamespace(
        strategies=None, global_batch=None, optimizer="sgd", lr=None, data="digits", seed=0, budget=1.0, price=None
    )
    train = ImageSet(
        images=torch.zeros(8, 1, 2, 2, dtype=torch.uint8), labels=torch.arange(8) % 2, num_classes=2, mean=(0.5,),
        std=(0.5,), name="two", source="two classes", shape=(1, 2, 2),
    )  # fmt: skip
    told = settings(args, [contest], 2, train)
    guessed = AccuracyPoint(epoch=1, seconds=1.0, train_loss=1.0, validation_loss=1.0, validation_accuracy=0.55)
    assert contest.profile.graph.num_classes > told.num_classes
    assert near_chance(guessed, told.num_classes)


def test_one_plan_always_runs():
    assert len(side_by_side(_contest(), 1, shared=True)) == 1


def test_what_was_emulated_is_said_in_the_comparison_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), tmp_path / "p.json")
    words = ("--strategies", "ddp", "--global-batch", "8", "--device", "emulated:p.json?dilation=5")
    args = arguments(VERBS[-1], words, {})
    take_single_values(args)
    contest = prepare(args, Console(), "tiny", nouns.cluster(2), 2, tmp_path)
    assert notes(contest)[0].startswith("tiny: emulated ")
    assert "from p.json, 5 times slower; nothing is trained" in notes(contest)[0]


def test_a_comparison_on_emulated_devices_is_not_called_one_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), tmp_path / "p.json")
    words = ("--models", "tiny", "--strategies", "ddp", "--global-batch", "8", "--data", "digits", "--device",
             "emulated:p.json")  # fmt: skip
    args, made = arguments(VERBS[-1], words, {}), []
    take_single_values(args)
    monkeypatch.setattr(bench_setup, "local_cluster", lambda *_: nouns.cluster(2))
    monkeypatch.setattr(emulated, "cells", lambda *a: [Cell(p.strategy, steps=[0.1] * 9) for p in a[2]])
    monkeypatch.setattr(page, "write", lambda bench, folder: made.append(bench) or [folder])
    verb._compare(args, Console(), tmp_path, "cpu", 2)
    assert made[0].environment.device_name == f"emulated {nouns.profile().device.name}"
    assert made[0].summary().startswith(f"bench on 2 ranks of emulated {nouns.profile().device.name}")
    assert "nothing trained\n" in capsys.readouterr().out


def test_an_emulated_device_of_other_inputs_than_asked_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), tmp_path / "p.json")
    words = ("--strategies", "ddp", "--device", "emulated:p.json", "--input", "3x7x7")
    with pytest.raises(UsageError, match=r"p.json is a profile of tiny at .*leave out --input, --classes and --prec"):
        prepare(arguments(VERBS[-1], words, {}), Console(), "tiny", nouns.cluster(2), 2, tmp_path)


@pytest.mark.parametrize(
    ("strategies", "compared"),
    [
        (("single", "ddp"), [("ddp", "single")]),
        (("single", "ddp", "asa"), [("asa", "ddp"), ("asa", "single")]),
        (("single", "tensor"), [("single", "tensor")]),
    ],
)
def test_strategies_are_compared_in_pairs_with_asa_or_else_with_ddp(strategies, compared, monkeypatch):
    def run(plans, *_, on_message):
        times = [0.5 + 0.1 * i for i in range(len(plans))]
        return [Cell(p.strategy, steps=[t] * 6, turns=[[t, t]] * 6) for t, p in zip(times, plans, strict=True)]

    monkeypatch.setattr(benchmark, "measure", run)
    contest = _contest()
    contest.plans = {s: contest.plans[s] for s in strategies}
    args = arguments(VERBS[-1], ("--models", "cnn"), {})
    take_single_values(args)
    measure(contest, args, Console(), "cpu", 1.0, lambda: None)
    first, *others = contest.comparisons
    assert first.left == first.right, "noise"
    assert [(c.left, c.right) for c in others] == compared
