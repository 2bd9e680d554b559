"""``asa plan --verify`` around the measuring: who is measured, what is refused, and what the chosen plan says."""

from __future__ import annotations

from dataclasses import replace

import fake_strategies
import nouns
import pytest

from asa.cli import entry
from asa.cli.commands import verify_plans
from asa.cli.console import Console
from asa.cost.machine import presets
from asa.errors import UnavailableError
from asa.executor.measuring.benchmark import Cell
from asa.ir import codec
from asa.ir.plan import Plan
from asa.planner import Request, parse_pin
from asa.planner.answer.posterior import Belief
from asa.planner.questions.finalists import finalists, joint
from asa.report.text import plan as report
from asa.report.text.tables import plain
from asa.schedules import schedules

STAGED = replace(fake_strategies.FULL, schedules=schedules())


def known(**changes):
    return nouns.profile(), nouns.cluster(2), Request(gpus=2, global_batch=8, **changes)


@pytest.mark.parametrize("count", [2, 5])
def test_data_parallelism_and_the_best_whole_strategy_are_among_the_finalists(count):
    profile, cluster, request = known()
    plans, draws, stock = finalists(profile, cluster, STAGED, request, count)
    assert len(plans) == len(draws) == count
    assert len({p.conduct for p in plans}) == count
    assert plans[0].strategy == "asa"
    assert stock is not None
    assert stock == 0 or plans[stock].strategy == "ddp"
    whole = min((b for b in plans[0].baselines if b.fits and b.name != "ddp"), key=lambda b: b.step_time_s)
    if count > 2:
        assert any(p.prediction.step_time_s == pytest.approx(whole.step_time_s, rel=1e-6) for p in plans)


def test_only_strategies_that_were_asked_for_are_finalists():
    profile, cluster, request = known(strategies=("ddp", "zero1"))
    assert {p.strategy for p in finalists(profile, cluster, STAGED, request, 4)[0]} <= {"ddp", "zero1"}


def test_pins_hold_for_every_finalist():
    profile, cluster, request = known(pins=(parse_pin("head=tensor@2"),))
    plans, _, stock = finalists(profile, cluster, STAGED, request, 4)
    assert stock is None
    assert all(p.components[2].tensor.degree == 2 for p in plans)


def test_draws_of_a_plan_lie_around_its_prediction():
    profile, cluster, request = known()
    plans, draws, _ = finalists(profile, cluster, STAGED, request, 3)
    for p, row in zip(plans, joint(plans, profile, cluster, STAGED), strict=True):
        assert sorted(row)[len(row) // 2] == pytest.approx(p.prediction.step_time_s, rel=0.05)
    assert (draws > 0).all()


def test_what_cannot_be_measured_here_is_refused():
    with pytest.raises(UnavailableError, match="CUDA devices"):
        verify_plans.check(presets.load("a100-nvlink-8"), 8, Console())


def test_ranks_that_share_cores_are_told_so(capsys):
    verify_plans.check(nouns.cluster(2), 512, Console())
    assert "512 ranks share" in capsys.readouterr().err


def test_devices_that_are_not_here_end_with_exit_code_5(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), tmp_path / "p.json")
    assert entry.run(["plan", "p.json", "--gpus", "8", "--cluster", "a100-nvlink-8", "--verify", "3"]) == 5
    assert "CUDA devices" in capsys.readouterr().err


def measured_plan() -> Plan:
    first, other = nouns.plan("asa", 0.5), nouns.plan("ddp", 0.6)
    other = replace(other, components=tuple(replace(c, checkpoint=True) for c in other.components))
    cells = [Cell("asa", steps=[0.9, 0.91]), Cell("ddp", steps=[0.7, 0.71, 0.72])]
    before = Belief(p_best=(0.7, 0.3), expected_regret=(0.05, 0.2))
    after = Belief(p_best=(0.01, 0.99), expected_regret=(0.3, 0.001))
    made = verify_plans._measured([first, other], cells, [5, 6], 9.0, 1, before, after, nouns.cluster(2))
    chosen = verify_plans._as_answer(first, other, verify_plans._verdict([first, other], 1, made))
    return replace(chosen, measured=made)


def test_the_plan_that_measurement_chose_keeps_its_name_its_bound_and_what_was_measured(tmp_path):
    chosen = measured_plan()
    assert chosen.strategy == "asa"
    assert chosen.components[0].checkpoint
    assert chosen.certificate.lower_bound_s <= chosen.prediction.step_time_s
    assert chosen.measured is not None
    assert (chosen.measured.step_time_s.median, chosen.measured.steps) == (0.71, 6)
    assert "ddp instead of" in chosen.notes[0]
    codec.save(chosen, tmp_path / "v.json")
    assert codec.load(Plan, tmp_path / "v.json") == chosen
    text = plain(report.render(chosen), width=140)
    assert "P(best) 70.0 % before and 99.0 % after" in text
    assert "710 ms" in text
    assert nouns.plan("asa").measured is None
    assert "measured" not in codec.to_data(nouns.plan("asa"))


def test_the_strategy_that_measurement_chose_among_those_asked_for_is_named():
    """Other commands take a plan for what its name says."""
    first, other = nouns.plan("ddp"), nouns.plan("fsdp")
    assert verify_plans._as_answer(first, other, "a note").strategy == "fsdp"
