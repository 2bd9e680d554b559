"""Groups of ranks, each under a synchronous plan of its own, that meet now and then: the same training where that is
promised, for whatever plan is inside."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training
from hand_plans import hand_plan
from stage_plans import staged
from test_consistency_runs import of, run

from asa.errors import UsageError
from asa.executor.measuring import equivalence
from asa.executor.measuring.model_copies import ModelCopies
from asa.ir import codec
from asa.ir.consistency import parse
from asa.ir.plan import DataDegree, Plan
from asa.launch import run_ranks
from asa.report.jobs.job import per_node
from asa.report.snippets import TOOLS
from asa.report.snippets.uniform_choice import choose
from asa.strategies import offered
from asa.zoo.models import build

EVERY_STEP = ("local_sgd:period=1:groups=2", "diloco:period=1:outer_rate=1:outer_momentum=0:groups=2")


def _net() -> torch.nn.Module:
    return build("cnn", num_classes=10, input_shape=(1, 8, 8), seed=0)


def _in_groups(inside: Plan, text: str) -> Plan:
    discipline = parse(text)
    count = discipline.groups or 1
    memory = inside.prediction.memory_bytes_per_rank * count
    return replace(
        inside, gpus=inside.num_ranks * count, consistency=discipline, strategy=text,
        prediction=replace(inside.prediction, memory_bytes_per_rank=memory),
    )  # fmt: skip


def _inside() -> dict[str, Plan]:
    """Plans of two ranks."""
    shape = {"input_shape": (1, 8, 8), "num_classes": 10, "global_batch": 24, "spec": "cnn"}
    split = hand_plan(_net(), 2, lambda _i, _n: (1, 2), **shape)
    return {
        "replicate": training.plan(ranks=2, batch=24),
        "tensor": split,
        "zero1": hand_plan(_net(), 2, lambda _i, _n: (2, 1), data_strategy=lambda _: "zero1", **shape),
        "zero3": hand_plan(_net(), 2, lambda _i, _n: (2, 1), data_strategy=lambda _: "zero3", **shape),
        "stages": staged(split, [1, 1], microbatches=1),
    }  # fmt: skip


def _weights(rank: int, plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    return [
        equivalence._run(
            p, ModelCopies(p, _net), offered(), rank, torch.device("cpu"), samples=24, dtype=torch.float64, steps=3
        ).weights
        for p in plans
    ]  # fmt: skip


def test_groups_that_meet_in_every_step_train_as_one_device_whatever_is_inside():
    one = training.plan(ranks=1, batch=24)
    plans = [_in_groups(inside, text) for inside in _inside().values() for text in EVERY_STEP]
    other = _in_groups(training.plan(ranks=2, batch=24), "local_sgd:period=3:groups=2")
    reference = run_ranks(1, _weights, [one], threads=1, timeout_s=120)[0][0]
    *found, later = run_ranks(4, _weights, [*plans, other], threads=1, timeout_s=120)[0]
    for plan, weights in zip(plans, found, strict=True):
        for key, value in weights.items():
            torch.testing.assert_close(value, reference[key], rtol=1e-9, atol=1e-12, msg=f"{plan.strategy}: {key}")
    assert any((w - reference[k]).abs().max() > 1e-6 for k, w in later.items() if w.is_floating_point())


@pytest.mark.parametrize(
    ("inside", "text"),
    [("tensor", "diloco:period=2:groups=2"), ("zero1", "diloco:period=4:fragments=2:overlap=1:groups=2")],
)
def test_a_run_in_groups_goes_on_as_if_it_had_not_ended(tmp_path: Path, inside: str, text: str):
    plan = _in_groups(_inside()[inside], text)
    assert codec.loads(Plan, codec.dumps(plan), source="here") == plan
    whole = of(run(plan, tmp_path), "epoch")
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000010")
    again = of(run(plan, tmp_path, resume=True), "epoch")
    assert [e["epoch"] for e in again] == [1]
    for figure in ("train_loss", "validation_loss"):
        assert again[0][figure] == pytest.approx(whole[1][figure], rel=1e-6)


def test_groups_that_cannot_be_are_refused_in_one_line():
    with pytest.raises(UsageError, match="4 ranks do not make 3 equal groups; ask for groups=2"):
        parse("local_sgd:groups=3").workers(4)
    with pytest.raises(UsageError, match="groups is 1; it must be at least 2"):
        parse("diloco:groups=1")
    with pytest.raises(UsageError, match="quorum counts workers of one rank each; leave out groups=2"):
        parse("diloco:quorum=1:groups=2")
    with pytest.raises(UsageError, match="not a parameter of ps_async"):
        parse("ps_async:groups=2")


def test_other_tools_are_not_handed_half_of_a_discipline():
    torch_ = TOOLS["torch"]
    plain = training.plan(ranks=2, batch=24)
    loose = replace(plain, consistency=parse("ps_async:placement=own"), gpus=3)
    assert not any("together" in n for n in choose(plain, torch_.able, "torch", recompute=torch_.recompute).notes)
    notes = choose(loose, torch_.able, "torch", recompute=torch_.recompute).notes
    assert any("take every step together, the plan trains under ps_async" in n for n in notes)
    assert per_node(loose, None, None) == 3
    with pytest.raises(UsageError, match="--gpus 2 --global-batch 12"):
        choose(_in_groups(plain, EVERY_STEP[0]), torch_.able, "torch", recompute=torch_.recompute)


def test_data_parallelism_inside_is_what_the_degrees_say():
    plan = _in_groups(training.plan(ranks=2, batch=24), "local_sgd:groups=2")
    assert (plan.num_ranks, plan.num_processes, plan.groups) == (2, 4, 2)
    inner = plan.of_group()
    assert (inner.gpus, inner.global_batch, inner.consistency) == (2, 12, None)
    assert inner.components[0].data == DataDegree(strategy="replicate", degree=2)


def test_a_verdict_counts_the_ranks_of_all_groups():
    verdict = equivalence.verify(_in_groups(training.plan(ranks=1, batch=24), EVERY_STEP[0]), _net, offered())
    assert verdict.equivalent
    assert verdict.ranks == 2
