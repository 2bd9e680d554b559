"""Gradients made smaller on their way: half the bytes, priced so, never called equivalent."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import nouns
import pytest
import torch

from asa.cli.entry import run
from asa.cost.machine import presets
from asa.cost.planned import price_plan
from asa.cost.traffic.buckets import remaining
from asa.errors import UsageError
from asa.executor.measuring import tolerance
from asa.executor.measuring.equivalence import verify
from asa.ir import codec
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.ir.traffic import Collective
from asa.launch import run_ranks
from asa.planner import Request, plan
from asa.report.text.verify import verdict
from asa.strategies import offered
from planner_tests import traffic_checks
from planner_tests.hand_plans import hand_plan, model_of, uniform
from planner_tests.small_models import INPUT, build
from planner_tests.test_zero import STRATEGIES, plan_of
from planner_tests.verified import verified


def with_compression(made: Plan, name: Any) -> Plan:
    return replace(made, compression=name)


def check(name: Any, made: Plan, model: str = "plain") -> Equivalence:
    return verified(with_compression(made, name), model, even=True)


def test_half_of_the_bytes_remain_and_only_of_gradients() -> None:
    gradient = Collective(op="all_reduce", phase="gradient", bytes=4e6, ranks=4)
    gathered = Collective(op="all_gather", phase="forward", bytes=4e6, ranks=4)
    assert [remaining(n, gradient, 1, whole=True) for n in ("none", "bf16", "fp16")] == [1.0, 0.5, 0.5]
    assert remaining("bf16", gathered, 1, whole=False) == 1.0
    assert remaining("powersgd", gradient, 1, whole=True) == pytest.approx(2 * 2 / 1000)
    assert remaining("powersgd", gradient, 1, whole=False) == 1.0
    assert remaining("powersgd", replace(gradient, bytes=16.0), 4, whole=True) == 1.0


@pytest.mark.parametrize("name", ["zero3", "ddp", "zero1"])
def test_a_plan_with_slow_links_is_faster_with_it(name: str) -> None:
    strategy = {"zero3": "fsdp"}.get(name, name)
    profile, cluster = nouns.profile(), nouns.cluster(4)
    times = {}
    for compression in ("none", "bf16"):
        request = Request(gpus=4, global_batch=8, strategies=(strategy,), compression=compression)  # type: ignore[arg-type]
        found = plan(profile, cluster, offered(), request)[0]
        assert found.compression == compression
        assert codec.loads(Plan, codec.dumps(found), source="text") == found
        times[compression] = found.prediction.step_time_s
        assert price_plan(found, profile, cluster, offered()).cost.total_s == pytest.approx(times[compression])
    assert times["bf16"] < 0.95 * times["none"]
    assert any("bf16" in note for note in found.notes)


def test_casting_is_paid_for_where_memory_bandwidth_is_known() -> None:
    profile, cluster = nouns.profile(), nouns.cluster(2)
    quick = replace(cluster.levels[0], tables=tuple(
        replace(t, points=tuple((size, 1e-9) for size, _ in t.points)) for t in cluster.levels[0].tables
    ))  # fmt: skip
    instant = replace(cluster, levels=(quick,), device=replace(cluster.device, memory_bandwidth=1e9))
    request = Request(gpus=2, global_batch=8, strategies=("ddp",))
    whole = plan(profile, instant, offered(), request)[0].prediction.step_time_s
    half = plan(profile, instant, offered(), replace(request, compression="fp16"))[0].prediction.step_time_s
    assert half > whole


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(UsageError, match="powersgd"):
        Request(gpus=2, global_batch=8, compression="zip")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_declared_is_what_runs(name: Any) -> None:
    """All data strategies in one network."""
    stretch = [x for x in traffic_checks.configurations(4) if x.layout.data == 4]
    assert {x.data.strategy for x in stretch} == set(STRATEGIES.data)
    graph, said = traffic_checks.graph_of(len(stretch)), Counter[str]()
    for component, x in zip(graph.components, stretch, strict=True):
        page, share = STRATEGIES.data[x.data.strategy].of(x.data), STRATEGIES.tensor["none"].share(component, 1)
        bucketed = page.memory(share, 4, "sgd").buckets > 0
        for c in page.traffic(share, 4, 1):
            said[c.op] += round(c.bytes * remaining(name, c, component.num_parameter_tensors, whole=bucketed))
    plans = [with_compression(traffic_checks.plan_of(stretch), name)]
    ran = run_ranks(4, traffic_checks.intercepted, plans, [len(stretch)], threads=1, timeout_s=120)
    assert ran == [[dict(said)]] * 4


@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("bf16", lambda i: ("replicate", "zero3")[i % 2], {}),
        ("fp16", "zero1", {"optimizer": "adamw", "microbatches": 1}),
        ("powersgd", "replicate", {"microbatches": 1}),
    ],
)
def test_training_is_near_that_of_one_device_and_never_called_the_same(
    name: Any, strategy: Any, options: dict[str, Any]
) -> None:
    found = check(name, plan_of("plain", [2], strategy, **options))
    assert found.within_tolerance, verdict(found)
    assert not found.equivalent
    assert found.max_rel_error > 1e-9, "something was compressed"
    assert (found.gradient_allowed_fp32, found.allowed) == (tolerance.TOLERANCE[name], tolerance.DRIFT)
    assert "by construction" in verdict(found)
    assert name in verdict(found)


def test_a_gradient_that_is_wrong_is_beyond_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.sharding.gradients import replicated

    honest = replicated.sender

    def more(axis: Any) -> Any:
        def send(bucket: Any) -> Any:
            wait = honest(axis)(bucket)
            return lambda: (wait(), bucket.flat.mul_(1.05))

        return send

    monkeypatch.setattr(replicated, "sender", more)
    found = check("bf16", plan_of("perceptron", [2], "replicate"), "perceptron")
    assert found.within_tolerance is False
    assert "BEYOND" in verdict(found)


def test_rounding_and_infinities_are_no_compression() -> None:
    """A network that loses digits in fp32 by itself, and a mask."""
    mask = {"mask": torch.tensor([0.0, float("-inf")]), "w": torch.ones(2)}
    assert tolerance.distance({**mask, "w": torch.tensor([1.0, 1.1])}, mask) == pytest.approx(0.1 / 2**0.5)
    plan = hand_plan(model_of("blocks"), 1, uniform(1, 1), input_shape=INPUT, num_classes=10, global_batch=8)
    found = verify(plan, lambda: build("blocks"), offered(), timeout_s=120)
    for rounding, within in ((0.0, False), (1e-3, True)):
        judged = tolerance.compressed(found, "powersgd", weights=0.0, gradients=7e-4, rounding=rounding)
        assert judged.within_tolerance is within


def test_presets_say_what_it_would_gain_on_slow_links_and_not_on_fast_ones() -> None:
    import known_models

    profile = known_models.profile(known_models.vgg16(32, 100), 8000.0, 64)
    gains = {}
    for name in ("t4-8x1-25g-tcp", "h100-nvlink-8"):
        times = []
        for compression in ("none", "fp16"):
            request = Request(gpus=8, global_batch=256, strategies=("ddp",), compression=compression)  # type: ignore[arg-type]
            times.append(plan(profile, presets.load(name), offered(), request)[0].prediction.step_time_s)
        gains[name] = 1 - times[1] / times[0]
    assert gains["t4-8x1-25g-tcp"] > 0.3
    assert gains["h100-nvlink-8"] < gains["t4-8x1-25g-tcp"] / 2


def test_the_command_line_hands_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codec.save(nouns.profile(), tmp_path / "tiny.json")
    codec.save(nouns.cluster(2), tmp_path / "box.json")
    words = [
        "plan",
        "tiny.json",
        "--cluster",
        "box.json",
        "--gpus",
        "2",
        "--strategies",
        "ddp",
        "-o",
        "p.json",
        "--json",
    ]
    assert run([*words, "--compress", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["compression"] == "bf16"
    assert codec.load(Plan, tmp_path / "p.json").compression == "bf16"
    assert run([*words, "--offload", "always"]) == 2
    assert "saves nothing" in json.loads(capsys.readouterr().out)["error"]


def test_what_is_no_number_is_an_error_that_a_document_holds_and_no_noise():
    nothing, one = torch.tensor([math.nan]), torch.tensor([1.0])
    for error in (
        tolerance.relative_error(nothing, nothing), tolerance.relative_error(one, nothing),
        tolerance.distance({"w": nothing}, {"w": one}), tolerance.loss_error(math.nan, math.nan),
        tolerance.loss_error(2.0, 0.0),
    ):  # fmt: skip
        assert error == tolerance.UNLIKE
        assert tolerance.noise(error) == 0.0
    assert tolerance.loss_error(0.0, 0.0) == 0.0
    assert tolerance.loss_error(1.1, 1.0) == tolerance.noise(tolerance.loss_error(1.1, 1.0)) == pytest.approx(0.1)
