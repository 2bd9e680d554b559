"""Every page of ``asa.strategies`` is held to its word: degree 1 is silent, state never rises with degree, and the
collectives a materialised plan really performs are those its pages and boundaries declare."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asa.cost.boundary.crossings import Ends
from asa.executor.model.loss import loss_of
from asa.executor.model.materialize import materialize
from asa.ir import transfer
from asa.ir.graph import LayerGraph
from asa.ir.plan import Plan
from asa.ir.traffic import Collective
from asa.launch import run_ranks
from asa.sharding.collectives import direct
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from planner_tests.hand_plans import Choose, alternating, copy_of, hand_plan, model_of, uniform
from planner_tests.small_models import EVEN_CLASSES as CLASSES
from planner_tests.small_models import INPUT, MODELS

BATCH = 24
OPS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
DIRECT = {
    "all_reduce": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 1), "broadcast": ("broadcast", 0),
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Bytes of every c10d collective, by kind, as the real tensors have them. One of
    :mod:`asa.sharding.collectives.direct` counts as what it is, and what it is made of as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._inside = False
        self._patched: pytest.MonkeyPatch | None = None

    def __enter__(self) -> Any:
        self._patched = pytest.MonkeyPatch()
        for name, (kind, whole) in DIRECT.items():
            self._patched.setattr(direct, name, self._counted(getattr(direct, name), kind, whole))
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        assert self._patched is not None
        self._patched.undo()
        super().__exit__(*problem)

    def _counted(self, call: Any, kind: str, whole: int) -> Any:
        def counting(*tensors: Any, **options: Any) -> Any:
            self.seen[kind] += tensors[whole].numel() * tensors[whole].element_size()
            self._inside = True
            try:
                return call(*tensors, **options)
            finally:
                self._inside = False

        return counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self._inside:
            name = func._schema.name.split("::")[1]
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if name == "_reduce_scatter_base_":
                tensors = [args[1]]
            self.seen[OPS.get(name, name)] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


@cache
def graph_of(name: str) -> LayerGraph:
    return layer_graph(model_of(name, even=True), model=name, input_shape=INPUT, num_classes=CLASSES[name])


def declared(plan: Plan, graph: LayerGraph) -> list[Collective]:
    """Everything the plan's pages and boundaries say will move in one step, per rank."""
    strategies, found = offered(), []
    layouts = plan.layouts()
    for component, a, layout in zip(graph.components, plan.components, layouts, strict=True):
        tensor = strategies.tensor[a.tensor.strategy]
        share = tensor.share(component, a.tensor.degree)
        found += tensor.traffic(component, a.tensor.degree, BATCH / layout.data)
        found += strategies.data[a.data.strategy].traffic(share, a.data.degree, layout.inner)
    for (before, source), (after, target) in pairwise(zip(graph.components, layouts, strict=True)):
        crossing = Ends.between(before, after).boundary(source, target)
        found += crossing.traffic(before.output_bytes_per_sample * BATCH)
    end, last = graph.components[-1], layouts[-1]
    leaving = Ends.between(end, None).boundary(last, transfer.whole(last))
    return found + list(leaving.traffic(end.output_bytes_per_sample * BATCH))


def _third_steps(rank: int, plans: list[Plan], name: str) -> list[dict[str, int]]:
    """:func:`_third_step` under each of several plans."""
    return [_third_step(rank, plan, name) for plan in plans]


def _third_step(rank: int, plan: Plan, name: str) -> dict[str, int]:
    model = materialize(
        plan,
        copy_of(name, even=True),
        torch.zeros((2, *INPUT)),
        rank=rank,
        strategies=offered(),
        device=torch.device("cpu"),
    )
    model.train()
    recorder = Recorder()
    for step in range(3):
        x = torch.randn((BATCH, *INPUT))[slice(*model.input_rows(BATCH))]
        start, stop = model.output_rows(BATCH)
        with recorder:
            recorder.seen.clear()
            output = model(x, torch.arange(BATCH), step)
            loss_of(output, torch.zeros(stop - start, dtype=torch.int64)).backward()
        for p in model.parameters():
            p.grad = None
    model.close()
    return dict(recorder.seen)


LAYOUTS: dict[int, dict[str, Choose]] = {
    2: {"ddp": uniform(2, 1), "tensor": uniform(1, 2)},
    4: {"hybrid": uniform(2, 2), "mixed": alternating(4), "mixed-shifted": alternating(4, shift=3)},
}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("width", LAYOUTS)
def test_what_is_declared_is_what_runs(name: str, width: int) -> None:
    shape: dict[str, Any] = {"input_shape": INPUT, "num_classes": CLASSES[name], "global_batch": BATCH}
    plans = [hand_plan(model_of(name, even=True), width, choose, **shape) for choose in LAYOUTS[width].values()]
    by_rank = run_ranks(width, _third_steps, plans, name, threads=1, timeout_s=120)
    for layout, plan, *ran in zip(LAYOUTS[width], plans, *by_rank, strict=True):
        said: Counter[str] = Counter()
        for c in declared(plan, graph_of(name)):
            said[c.op] += round(c.bytes)
        for rank, seen in enumerate(ran):
            for op in {*said, *seen}:
                assert seen.get(op, 0) == said[op], f"{layout}: rank {rank} {op}"


@pytest.mark.parametrize("width", [2, 4])
def test_sharded_traffic_is_what_runs(width: int) -> None:
    """Fully sharded: weights gathered twice, gradients scattered once, to the byte where dimensions divide."""
    plan = hand_plan(
        model_of("plain", even=True), width, uniform(width, 1), input_shape=INPUT, num_classes=100, global_batch=BATCH,
        data_strategy=lambda _i: "zero3",
    )  # fmt: skip
    said: Counter[str] = Counter()
    for c in declared(plan, graph_of("plain")):
        said[c.op] += round(c.bytes)
    assert run_ranks(width, _third_step, plan, "plain", threads=1, timeout_s=120) == [dict(said)] * width


@pytest.mark.parametrize("name", sorted(MODELS))
def test_degree_one_is_silent_and_state_never_rises(name: str) -> None:
    strategies = offered()
    for component in graph_of(name).components:
        whole = strategies.tensor["none"].share(component, 1)
        assert strategies.tensor["none"].traffic(component, 1, 8) == ()
        for split in ("tensor", "sequence"):
            assert strategies.tensor[split].traffic(component, 1, 8) == ()
            assert strategies.tensor[split].share(component, 1) == whole
        for page in strategies.data.values():
            assert page.traffic(whole, 1, 1) == ()
            states = [page.memory(whole, d, "sgd").state + page.memory(whole, d, "sgd").gradients for d in (1, 2, 4, 8)]
            assert states == sorted(states, reverse=True)
        limit = component.split.max_degree if component.split else 1
        for split in ("tensor", "sequence"):
            shares = [strategies.tensor[split].share(component, t) for t in range(1, limit + 1)]
            for less, more in pairwise(shares):
                assert more.parameter_bytes <= less.parameter_bytes
                assert more.saved_bytes_per_sample <= less.saved_bytes_per_sample
            assert strategies.tensor[split].refusal(component, limit + 1)


def test_what_is_cut_by_tokens_moves_what_is_declared() -> None:
    """5 tokens over 2 ranks: shards are uneven, and travel padded."""
    name = "vision_transformer"
    plan = hand_plan(
        model_of(name, even=True), 2, uniform(1, 2), input_shape=INPUT, num_classes=CLASSES[name], global_batch=BATCH,
        data_strategy=lambda _i: "zero1", by_tokens=lambda _i: True,
    )  # fmt: skip
    assert "sequence" in {c.tensor.strategy for c in plan.components}
    said: Counter[str] = Counter()
    for c in declared(plan, graph_of(name)):
        if c.phase != "update":  # no optimizer here
            said[c.op] += round(c.bytes)
    assert run_ranks(2, _third_step, plan, name, threads=1, timeout_s=120) == [dict(said)] * 2


def test_a_changed_declaration_of_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.strategies.sequence import SequenceParallel

    honest = SequenceParallel.traffic
    monkeypatch.setattr(SequenceParallel, "traffic", lambda self, c, d, s: honest(self, c, d, s)[:-1])
    with pytest.raises(AssertionError, match="all_reduce"):
        test_what_is_cut_by_tokens_moves_what_is_declared()


def test_a_changed_declaration_breaks_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.strategies.replicate import Replicate

    honest = Replicate.traffic
    monkeypatch.setattr(Replicate, "traffic", lambda self, s, d, k: honest(self, s, d, k) * 2)
    with pytest.raises(AssertionError, match="all_reduce"):
        test_what_is_declared_is_what_runs("plain", 2)
