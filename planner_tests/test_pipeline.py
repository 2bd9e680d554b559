"""Plans of several stages train as one device does, whatever the schedule, the widths and what runs inside them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from asa.errors import InvalidInputError, UsageError
from asa.executor.measuring.equivalence import verify
from asa.executor.model.materialize import _check_stages, materialize
from asa.executor.model.reduction import Reduction
from asa.executor.model.step import played
from asa.ir.equivalence import Equivalence
from asa.ir.layout import Boundary
from asa.ir.plan import Plan
from asa.ir.transfer import Hop, hops, whole
from asa.launch import run_ranks
from asa.strategies import offered
from planner_tests.hand_plans import copy_of, hand_plan, model_of, traced, uniform
from planner_tests.small_models import CLASSES, INPUT, Auxiliary, build
from planner_tests.stage_plans import in_turn, split_where_possible, staged
from planner_tests.test_strategy_contract import Recorder, graph_of
from planner_tests.verified import verified


def plan_of(name: str, widths: list[int], **options: Any) -> Plan:
    base = hand_plan(model_of(name), 2, uniform(1, 2), input_shape=INPUT, num_classes=CLASSES[name], global_batch=24)
    return staged(base, widths, **options)


def check(name: str, widths: list[int], samples: int | None = None, **options: Any) -> Equivalence:
    return verified(plan_of(name, widths, **options), name, samples=samples)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "widths"),
    [
        ("1f1b", 4, [1, 1]), ("gpipe", 3, [1, 1]), ("layers", 1, [1, 1]),
        ("1f1b", 4, [1, 2]), ("1f1b", 4, [2, 1]), ("layers", 1, [2, 1]),
    ],
)  # fmt: skip
def test_schedules_and_widths(schedule: Any, microbatches: int, widths: list[int]) -> None:
    found = check("blocks", widths, schedule=schedule, microbatches=microbatches)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
    if widths == [1, 1]:
        assert found.max_rel_error == found.loss_error == found.gradient_error_fp32 == 0, "the same arithmetic"


@pytest.mark.parametrize(
    ("name", "widths", "options"),
    [
        ("plain", [2, 2], {"degrees": split_where_possible}),
        ("perceptron", [2, 1], {"degrees": in_turn, "samples": 26}),
        ("vision_transformer", [2, 2], {"degrees": in_turn, "schedule": "gpipe"}),
        ("blocks", [3, 1], {"degrees": in_turn}),
        ("blocks", [2, 2], {"strategy": lambda i: ("zero3", "replicate")[i % 2]}),
        ("plain", [2, 1], {"strategy": lambda _i: "zero3", "schedule": "gpipe"}),
        ("plain", [1, 2, 1], {"samples": 19, "microbatches": 3}),
        ("vision_transformer", [1, 1, 1, 1], {}),
    ],
    ids=["tensor", "mixed-uneven", "mixed", "wide", "sharded-and-replicated", "sharded", "odd-rows", "deep"],
)
def test_what_runs_inside_the_stages(name: str, widths: list[int], options: dict[str, Any]) -> None:
    found = check(name, widths, **options)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_a_gradient_scaled_between_stages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hop, "gradient_scale", property(lambda _self: 1.001))
    assert not check("plain", [1, 1]).equivalent


def test_a_wrapper_that_was_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Reduction.__init__

    def deaf(self: Reduction, modules: Any) -> None:
        honest(self, modules)
        self.quiet = True

    monkeypatch.setattr(Reduction, "__init__", deaf)
    assert not check("plain", [2, 1]).equivalent


def test_nothing_goes_back_to_what_is_not_trained() -> None:
    def frozen() -> nn.Module:
        model = build("plain")
        model[0].requires_grad_(False)
        return model

    base = hand_plan(frozen(), 2, uniform(2, 1), input_shape=INPUT, num_classes=100, global_batch=24)
    plan = staged(base, [2, 1], cuts=[1 + [c.name for c in base.components].index("0.3")])
    assert verify(plan, frozen, offered(), timeout_s=120).equivalent

    def links(rank: int) -> tuple[bool, bool]:
        model = materialize(
            plan, frozen(), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(), device=torch.device("cpu")
        )
        return model.links.gradient_in is None, model.links.gradient_out is None

    assert run_ranks(3, links, threads=1, timeout_s=120) == [(True, True)] * 3


def _messages(rank: int, plan: Plan, name: str) -> tuple[Counter[tuple[str, int, int]], list[str]]:
    """What one step of training sends, and the names this rank holds on a device with memory."""
    import torch.distributed as dist

    from asa.sharding.collectives import transfer

    model = materialize(
        plan, copy_of(name), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(), device=torch.device("cpu")
    )
    model.train()
    seen: Counter[tuple[str, int, int]] = Counter()
    honest = dist.isend

    def isend(tensor: torch.Tensor, dst: int, group: Any = None) -> Any:
        assert model.position.arriving is None or model.position.leaving is None
        seen["ahead" if dst > rank else "back", rank, dst] += tensor.nbytes
        return honest(tensor, dst, group=group)

    transfer.dist.isend = isend  # this process ends with the test
    batch = plan.global_batch
    x, labels = torch.randn(batch, *INPUT), torch.zeros(batch, dtype=torch.int64)
    for step in range(2):
        seen.clear()
        played(model, torch.arange(batch), step, lambda rows: x[rows], lambda rows: labels[rows])
    return seen, [n for c in model.components for n, _ in c.named_parameters()]


def test_messages_are_those_declared_and_weights_are_held_once() -> None:
    plan = plan_of("plain", [2, 1])
    model = build("plain")
    found = run_ranks(3, _messages, plan, "plain", threads=1, timeout_s=120)
    (hop,) = hops(plan)
    first = next(i for i, c in enumerate(plan.components) if c.stage == 1)
    size = 4 * int(torch.tensor(traced(model, INPUT).components[first].input_shape).prod())
    said: Counter[tuple[str, int, int]] = Counter()
    per_microbatch = plan.global_batch // plan.num_microbatches
    for m in hop.forward(per_microbatch):
        said["ahead", m.source, m.target] += plan.num_microbatches * m.rows * size
    for m in hop.backward(per_microbatch):
        said["back", m.source, m.target] += plan.num_microbatches * m.rows * size
    ran: Counter[tuple[str, int, int]] = Counter()
    for seen, _ in found:
        ran.update(seen)
    assert ran == said
    names = [n for n, _ in model.named_parameters()]
    assert found[0][1] == found[1][1]
    assert [*found[0][1], *found[2][1]] == names


def _collectives(rank: int, plan: Plan, name: str) -> dict[str, int]:
    model = materialize(
        plan, copy_of(name, even=True), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(),
        device=torch.device("cpu"),
    )  # fmt: skip
    model.train()
    batch, recorder = plan.global_batch, Recorder()
    x, labels = torch.randn(batch, *INPUT), torch.zeros(batch, dtype=torch.int64)
    for step in range(3):
        with recorder:
            recorder.seen.clear()
            played(model, torch.arange(batch), step, lambda rows: x[rows], lambda rows: labels[rows])
        model.zero_grad()
    return {op: n for op, n in recorder.seen.items() if op not in ("send", "recv_")}


@pytest.mark.parametrize(("name", "cut"), [("perceptron", 1), ("blocks", 2), ("vision_transformer", 2)])
def test_collectives_at_the_edges_of_stages_are_those_declared(name: str, cut: int) -> None:
    """A split component may leave its stage with partial sums, or hand back a partial gradient: each is summed once."""
    base = hand_plan(model_of(name, even=True), 2, uniform(1, 2), input_shape=INPUT, num_classes=12, global_batch=24)
    plan = staged(base, [2, 2], cuts=[cut], microbatches=2, degrees=split_where_possible)
    graph, tensor, rows = graph_of(name), offered().tensor, plan.global_batch // plan.num_microbatches
    (hop,) = hops(plan)
    partial = [
        (c.split.entry_partial, c.split.exit_partial) if c.split and a.tensor.degree > 1 else (False, False)
        for c, a in zip(graph.components, plan.components, strict=True)
    ]
    found = run_ranks(4, _collectives, plan, name, threads=1, timeout_s=120)
    for stage, indices in enumerate((range(cut), range(cut, len(partial)))):
        said: Counter[str] = Counter()
        edges = []
        for i in indices:
            component, a = graph.components[i], plan.components[i]
            for c in tensor[a.tensor.strategy].traffic(component, a.tensor.degree, rows):
                said[c.op] += 2 * round(c.bytes)
            if i + 1 in indices:
                layouts = plan.layouts()
                inner = Boundary(
                    source=layouts[i], target=layouts[i + 1], exit_partial=partial[i][1],
                    entry_partial=partial[i + 1][0],
                )  # fmt: skip
                edges.append((inner, i))
        if stage == 0:  # the output is made whole before it is sent
            edge = Boundary(source=hop.source, target=whole(hop.source), exit_partial=partial[cut - 1][1])
        else:
            edge = Boundary(source=whole(hop.target), target=hop.target, entry_partial=partial[cut][0])
        edges.append((edge, cut - 1))
        if stage == 1:
            last = plan.layouts()[-1]
            edges.append((Boundary(source=last, target=whole(last), exit_partial=partial[-1][1]), len(partial) - 1))
        for boundary, i in edges:
            for c in boundary.traffic(graph.components[i].output_bytes_per_sample * rows):
                said[c.op] += 2 * round(c.bytes)
        for seen in found[2 * stage : 2 * stage + 2]:
            assert seen == dict(said)


def test_what_cannot_be_cut_is_said_in_one_line() -> None:
    base = hand_plan(Auxiliary(), 1, uniform(1, 1), input_shape=INPUT, num_classes=10)
    with pytest.raises(UsageError, match=r"an output of its own .* in stage 0 of 2: only the last stage may"):
        verify(staged(base, [1, 1], cuts=[len(base.components) - 1]), Auxiliary, offered(), timeout_s=120)
    with pytest.raises(UsageError, match="layers runs 1 microbatch, asked 4"):
        verify(plan_of("plain", [1, 1], schedule="layers"), lambda: build("plain"), offered(), timeout_s=120)
    with pytest.raises(InvalidInputError, match="2 stages and schedule 'zero_bubble'; this executor runs 1f1b, gpipe"):
        verify(plan_of("plain", [1, 1], schedule="zero_bubble"), lambda: build("plain"), offered(), timeout_s=120)


def test_a_parameter_in_two_stages_is_refused() -> None:
    plan, model = plan_of("plain", [1, 1]), traced(build("plain"), INPUT)
    first, last = model.components[0], model.components[-1]
    last.register_parameter("tied", next(first.parameters()))
    with pytest.raises(UsageError, match=r"tied is shared by stages 0 and 1: .* must be in one stage"):
        _check_stages(plan, model)
