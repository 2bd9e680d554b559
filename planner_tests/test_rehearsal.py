"""One rank of a plan for eight, on one device without the others: what it computes and holds is the real thing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asa.cli import entry
from asa.errors import UsageError
from asa.executor.measuring import rehearsal
from asa.executor.measuring.benchmark import BenchOptions, measure
from asa.ir import codec
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.ir.rehearsal import ComponentSpan, Spans
from asa.planner import Request
from asa.planner import plan as solve
from asa.sharding.collectives import direct
from asa.strategies import offered
from planner_tests import nouns
from planner_tests.hand_plans import alternating, hand_plan, model_of, uniform
from planner_tests.small_models import CLASSES, INPUT, build
from planner_tests.stage_plans import staged


def plan_of(name: str, choose: Any, width: int = 8, **options: Any) -> Plan:
    return hand_plan(
        model_of(name), width, choose, input_shape=INPUT, num_classes=CLASSES[name], global_batch=48, **options
    )  # fmt: skip


def rehearsed(plan: Plan, name: str, rank: int = 0) -> Spans:
    return rehearsal.rehearse(
        plan, build(name), rank=rank, strategies=offered(), device=torch.device("cpu"), steps=2
    )  # fmt: skip


def zero(stage: int) -> dict[str, Any]:
    return {"data_strategy": lambda _i: f"zero{stage}"}


@pytest.mark.parametrize(
    ("name", "choose", "options", "rank"),
    [
        ("blocks", uniform(8, 1), {}, 3),
        ("blocks", uniform(8, 1), {"num_microbatches": 2}, 0),
        ("plain", uniform(8, 1), zero(1), 7),
        ("plain", uniform(8, 1), zero(2), 0),
        ("blocks", uniform(8, 1), zero(3), 5),
        ("vision_transformer", uniform(2, 4), {}, 6),
        ("blocks", alternating(8), {}, 2),
    ],
    ids=["ddp", "accumulated", "zero1", "zero2", "zero3", "hybrid", "mixed"],
)
def test_every_kind_of_plan_of_one_stage(name: str, choose: Any, options: Any, rank: int) -> None:
    plan = plan_of(name, choose, **options)
    found = rehearsed(plan, name, rank)
    assert [c.name for c in found.components] == [c.name for c in plan.components]
    assert all(c.forward_s > 0 for c in found.components)
    assert sum(c.backward_s for c in found.components) > 0
    assert found.update_s > 0
    assert sum(c.saved_bytes for c in found.components) < found.peak_memory_bytes
    assert not dist.is_initialized(), "the made-up world is gone"


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (3, 1), (5, 2)], ids=["first", "middle", "last"])
def test_every_stage_of_a_pipeline(rank: int, stage: int) -> None:
    base = plan_of("blocks", uniform(1, 2), width=2)
    plan = staged(base, [2, 2, 2], schedule="1f1b", microbatches=4)
    found = rehearsed(plan, "blocks", rank)
    assert [c.name for c in found.components] == [c.name for c in plan.components if c.stage == stage]


def test_memory_is_that_of_the_real_run() -> None:
    """Two real ranks and each of them rehearsed: the same peak by the same count."""
    from functools import partial

    from asa.cli.bench_setup import images

    plan = dataclasses.replace(plan_of("plain", uniform(2, 1), width=2), global_batch=16)
    options = BenchOptions(budget_s=0.5, evaluations=1, evaluation_samples=16)
    (cell,) = measure([plan], partial(build, "plain"), offered(), partial(images, "digits", None, INPUT), options)
    assert cell.peak_memory_bytes is not None
    alone = rehearsed(plan, "plain").peak_memory_bytes
    assert alone == pytest.approx(cell.peak_memory_bytes[0], rel=0.02)


def test_shards_are_what_a_rank_holds() -> None:
    whole = rehearsed(plan_of("plain", uniform(8, 1)), "plain")
    sharded = rehearsed(plan_of("plain", uniform(8, 1), **zero(3)), "plain")
    assert sharded.peak_memory_bytes < 0.9 * whole.peak_memory_bytes


def test_garbage_from_absent_ranks_reaches_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collective of a made-up group leaves behind is not to be relied on: here it is not a number."""
    poisoned = []

    def poison(honest: Any) -> Any:
        def scatter(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
            work = honest(output, input, **options)
            output.fill_(math.nan)
            poisoned.append(output)
            return work

        return scatter

    monkeypatch.setattr(direct, "reduce_scatter_tensor", poison(direct.reduce_scatter_tensor))
    model = build("plain")
    kept: list[torch.nn.Parameter] = []
    monkeypatch.setattr(rehearsal, "active_peak", lambda worker, _step: kept.extend(worker.model.parameters()) or 1)
    rehearsal.rehearse(
        plan_of("plain", uniform(8, 1), **zero(3)), model, rank=0, strategies=offered(), device=torch.device("cpu"),
        steps=1,
    )  # fmt: skip
    assert kept
    assert poisoned
    assert all(torch.isfinite(p.to_local()).all() for p in kept)  # type: ignore[operator]


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks 0 to 7, asked for rank 8"):
        rehearsed(plan_of("plain", uniform(8, 1)), "plain", 8)


def test_the_command_compares_with_a_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``asa train --rehearse``: contention, interference and spread are the plan's, not the rehearsal's."""
    from asa.cli.commands.rehearse import without_contention

    profile, cluster = nouns.profile(), nouns.cluster()
    calm, quiet = without_contention(profile, cluster)
    assert all(t.forward.p90 == t.forward.median for t in calm.timings)
    assert quiet.contention == ()
    assert quiet.overlap.saving == 1
    plan = solve(profile, cluster, offered(), Request(gpus=2, global_batch=8))[0]
    codec.save(plan, tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    assert entry.run(["train", "plan.json", "--rehearse", "0", "--gpus", "64", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert f"the plan is for {plan.gpus} devices, asked for 64" in json.dumps(said)
    assert entry.run(["train", "plan.json", "--rehearse", "0", "--device", "emulated:profile.json", "--json"]) == 2
    assert "--rehearse computes for real" in json.loads(capsys.readouterr().out)["error"]


def test_times_of_another_kind_of_device_are_said_not_to_compare() -> None:
    """Also where the plan's profile is of this very kind, and its times were estimated from it."""
    from asa.cli.commands.rehearse import compare

    profile, cluster = nouns.profile(), nouns.cluster()
    plan = solve(profile, cluster, offered(), Request(gpus=2, global_batch=8))[0]
    nothing = tuple(ComponentSpan(name=c.name, forward_s=0.1, backward_s=0.1, saved_bytes=1) for c in plan.components)
    second = Stat(median=1.0, p10=1.0, p90=1.0, n=1)
    spans = Spans(rank=0, steps=1, step_s=second, components=nothing, update_s=0.1, peak_memory_bytes=1)
    assert compare(plan, profile, cluster, spans, "cpu").notes == ()
    derived = dataclasses.replace(plan, origin="estimated")
    assert compare(derived, profile, cluster, spans, "cpu").notes == (), "no link is rehearsed"
    elsewhere = dataclasses.replace(plan, device_type="cuda", origin="estimated")
    notes = compare(elsewhere, profile, cluster, spans, "cpu").notes
    assert any("rehearsed on cpu: they do not compare" in n for n in notes)
    assert any("estimated" in n for n in notes)
