"""Sharded optimizer state and gradients: exact, and what moves and is held is what was declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from tables import some

from asa.executor.model.materialize import materialize
from asa.executor.model.step import played
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.executor.training.optimizer import build_optimizer
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.scheduler import adapt
from asa.sharding.gradients.updates import SharedUpdate
from asa.strategies import offered
from asa.strategies.zero1 import SharedOptimizer
from asa.strategies.zero2 import ShardedGradients
from planner_tests.hand_plans import copy_of, hand_plan, model_of, uniform
from planner_tests.small_models import EVEN_CLASSES as CLASSES
from planner_tests.small_models import INPUT
from planner_tests.stage_plans import data_parallel, in_turn, staged
from planner_tests.test_strategy_contract import OPS, Recorder, graph_of
from planner_tests.verified import verified

STRATEGIES = offered()
BATCH = 24


def plan_of(name: str, widths: list[int], strategy: Any, *, optimizer: str = "sgd", **options: Any) -> Plan:
    choose = strategy if callable(strategy) else lambda _i: strategy
    base = hand_plan(
        model_of(name, even=True), 2, uniform(1, 2), input_shape=INPUT, num_classes=CLASSES[name], global_batch=BATCH,
        optimizer=optimizer,
    )  # fmt: skip
    return staged(base, widths, **({"strategy": choose, "microbatches": 2} | options))


def check(name: str, *args: Any, **options: Any) -> Equivalence:
    return verified(plan_of(name, *args, **options), name, even=True)


STAGES: dict[str, Any] = {"schedule": "gpipe", "microbatches": 3, "checkpoint": lambda i: i % 2 == 0}


@pytest.mark.parametrize(
    ("strategy", "name", "widths", "options"),
    [
        ("zero2", "plain", [3], {"optimizer": "adamw"}),
        ("zero1", "plain", [4], {"degrees": lambda _i, _w: (2, 2), "optimizer": "adamw"}),
        ("zero2", "plain", [4], {"degrees": lambda _i, _w: (2, 2)}),
        ("zero1", "blocks", [2, 1], {"degrees": in_turn, "microbatches": 3}),
        ("zero2", "blocks", [2, 1], STAGES),
    ],
    ids=["zero2-uneven", "zero1-tensor", "zero2-tensor", "zero1-stages", "zero2-stages"],
)
def test_training_is_that_of_one_device(strategy: str, name: str, widths: list[int], options: dict[str, Any]) -> None:
    found = check(name, widths, strategy, **options)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_all_data_strategies_in_one_network() -> None:
    assert check("blocks", [2], lambda i: ("replicate", "zero1", "zero2", "zero3")[i % 4], optimizer="adamw").equivalent


def test_an_update_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedUpdate, "publish", lambda _self: None)
    assert not check("plain", [2], "zero1").equivalent


def _third_steps(rank: int, plans: list[Plan], name: str) -> list[tuple[dict[str, int], int, int]]:
    """:func:`_third_step` under each of several plans."""
    return [_third_step(rank, plan, name) for plan in plans]


def _third_step(rank: int, plan: Plan, name: str) -> tuple[dict[str, int], int, int]:
    """Bytes of every collective of a whole step; bytes of optimizer state; bytes of weights between steps."""
    model = materialize(
        plan, copy_of(name, even=True), torch.zeros((2, *INPUT)), rank=rank, strategies=STRATEGIES,
        device=torch.device("cpu"),
    )  # fmt: skip
    optimizer = build_optimizer("sgd", model.updated)
    model.train()
    recorder, x = Recorder(), torch.randn((BATCH, *INPUT))
    labels = torch.zeros(BATCH, dtype=torch.int64)
    for step in range(3):
        with recorder:
            recorder.seen.clear()
            model.zero_grad()
            played(model, torch.arange(BATCH), step, lambda rows: x[rows], lambda rows: labels[rows])
            optimizer.step()
            model.share_updates()
    state = sum(
        getattr(v, "_local_tensor", v).nbytes
        for held in optimizer.state.values()
        for v in held.values()
        if isinstance(v, torch.Tensor)
    )
    weights = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    model.close()
    return dict(recorder.seen), state, weights


KINDS = ("replicate", "zero1", "zero2", "zero3")


@pytest.mark.parametrize(("width", "microbatches"), [(2, 1), (4, 2)])
def test_what_is_declared_is_what_runs(width: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, where dimensions divide; per step or per microbatch as the phase says."""
    monkeypatch.setitem(OPS, "broadcast_", "broadcast")
    plans = [plan_of("plain", [width], kind, microbatches=microbatches, degrees=data_parallel) for kind in KINDS]
    by_rank = run_ranks(width, _third_steps, plans, "plain", threads=1, timeout_s=120)
    for strategy, ran in zip(KINDS, zip(*by_rank, strict=True), strict=True):
        _check_declared(strategy, width, microbatches, ran)


def _check_declared(
    strategy: str, width: int, microbatches: int, ran: Sequence[tuple[dict[str, int], int, int]]
) -> None:
    """Check what ranks moved and hold (``ran``, by rank) against what the strategy declares."""
    page, said = STRATEGIES.data[strategy], Counter[str]()
    weights = state = 0.0
    for component in graph_of("plain").components:
        share = STRATEGIES.tensor["none"].share(component, 1)
        held = page.memory(share, width, "sgd")
        weights, state = weights + component.parameter_bytes, state + held.optimizer
        for c in page.traffic(share, width, 1):
            said[c.op] += round(c.bytes) * (microbatches if c.phase in ("forward", "backward") else 1)
    for seen, _, _ in ran:
        assert seen == dict(said), strategy
    largest = max(bytes_of for _, bytes_of, _ in ran)
    if strategy == "zero1":
        # The rank with the most: parameters are not cut, and the page counts component by component.
        assert weights / width <= largest <= state
    else:
        assert largest == state
    assert {held for _, _, held in ran} == {weights / (width if strategy in ("zero2", "zero3") else 1)}


_FEW = [("1f1b", KINDS), ("gpipe", ("zero2",))]


@pytest.mark.parametrize(
    ("schedule", "strategies"), some([*_FEW, ("gpipe", ("replicate", "zero1", "zero3"))], _FEW), ids=str
)
def test_stages_move_what_their_components_declare(
    schedule: Any, strategies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many microbatches are in flight, gradients are reduced once, and nothing is gathered for nothing."""
    monkeypatch.setitem(OPS, "broadcast_", "broadcast")
    plans = [plan_of("plain", [2, 2], kind, microbatches=4, schedule=schedule) for kind in strategies]
    by_rank = run_ranks(4, _third_steps, plans, "plain", threads=1, timeout_s=120)
    for strategy, plan, ran in zip(strategies, plans, zip(*by_rank, strict=True), strict=True):
        _check_stages(strategy, plan, ran)


def _check_stages(strategy: str, plan: Plan, ran: Sequence[tuple[dict[str, int], int, int]]) -> None:
    """Check what the ranks of two stages of two moved (``ran``, by rank) against what their components declare."""
    for stage in (0, 1):
        said = Counter[str]()
        for component, a in zip(graph_of("plain").components, plan.components, strict=True):
            if a.stage == stage:
                for c in STRATEGIES.data[strategy].traffic(STRATEGIES.tensor["none"].share(component, 1), 2, 1):
                    said[c.op] += round(c.bytes) * (4 if c.phase in ("forward", "backward") else 1)
        for seen, _, _ in ran[2 * stage : 2 * stage + 2]:
            assert {op: n for op, n in seen.items() if op not in ("send", "recv_")} == dict(said), strategy


@pytest.mark.parametrize("page", [SharedOptimizer(), ShardedGradients()], ids=["zero1", "zero2"])
def test_degree_one_is_silent_and_state_never_rises(page: Any) -> None:
    for component in graph_of("blocks").components:
        share = STRATEGIES.tensor["none"].share(component, 1)
        assert page.traffic(share, 1, 1) == ()
        for optimizer in ("sgd", "adamw"):
            found = [page.memory(share, d, optimizer) for d in (1, 2, 3, 4, 8)]
            states = [m.state + m.gradients for m in found]
            assert states == sorted(states, reverse=True)
        alone = STRATEGIES.data["replicate"].memory(share, 1, "sgd")
        assert page.memory(share, 1, "sgd") == alone


def _tensor_traffic(rank: int, plan: Plan, name: str) -> dict[str, int]:
    return _third_step(rank, plan, name)[0]


def test_recomputing_repeats_the_collectives_of_forward_and_no_others() -> None:
    """What a split component moves inside its forward moves twice; boundaries and backward are as without."""
    plain = plan_of("blocks", [2], "replicate", degrees=lambda _i, w: (1, w), microbatches=1)
    twice = replace(plain, components=tuple(replace(c, checkpoint=True) for c in plain.components))
    before, after = (run_ranks(2, _tensor_traffic, p, "blocks", threads=1, timeout_s=120)[0] for p in (plain, twice))
    inside: Counter[str] = Counter()
    for component, a in zip(graph_of("blocks").components, plain.components, strict=True):
        if a.tensor.degree > 1:
            for c in STRATEGIES.tensor["tensor"].traffic(component, 2, BATCH):
                if c.phase == "forward":
                    inside[c.op] += round(c.bytes)
    assert inside
    assert {op: after[op] - before[op] for op in after if after[op] != before[op]} == dict(inside)


def _with(plan: Plan, strategy: Any) -> Plan:
    return replace(plan, components=tuple(replace(c, data=replace(c.data, strategy=strategy)) for c in plan.components))


def test_runs_are_continued_under_every_strategy(tmp_path: Path) -> None:
    """Each epoch under another: the checkpoint says the same whoever wrote it."""
    make: dict[str, Any] = {"strategies": STRATEGIES, "adapt": adapt}
    usual: dict[str, Any] = {"steps_per_epoch": 4, "lr": 0.01, "warmup": 0.0}
    base = training.plan("logistic", ranks=2, optimizer="adamw")
    for epochs, strategy in enumerate(("zero1", "zero2", "zero1", "zero3"), start=1):
        settings = training.settings(tmp_path, epochs=epochs, resume=epochs > 1, **usual)
        result = train(_with(base, strategy), settings, **make)
        assert len(result["epochs"]) == epochs
        found = checkpoint.find(tmp_path / outdir.CHECKPOINTS)
        moments = checkpoint.read(found.path, checkpoint.OPTIMIZER)
        weights = checkpoint.read(found.path, checkpoint.MODEL)
        assert {n.rsplit("/", 1)[0] for n in moments} == set(weights)
        assert all(float(v) == 4 * epochs for n, v in moments.items() if n.endswith("/step"))
    losses = [e["train_loss"] for e in result["epochs"]]
    assert losses[-1] < losses[0]
