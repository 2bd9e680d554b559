"""Tokens cut between tensor-parallel blocks: derived from the graph, priced, chosen by name, and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import known_models
import pytest
import torch
from torch import nn

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.machine.what_if import slower_profile
from asa.cost.memory.peak import needed
from asa.errors import InfeasibleError, UsageError
from asa.interfaces.schedule import Schedule
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.graph import InnerCollective, SequenceSplit
from asa.ir.plan import Plan, TensorDegree
from asa.ir.profile import Profile, Stat
from asa.planner import Request, parse_pin, plan
from asa.planner.questions.explain import explain, why_not
from asa.planner.search import search
from asa.planner.space.baselines import uniform as uniform_ways
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.profiler.measure import profile_module
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.describe import tensor_split
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.layers.tensor import detached_copy, sequence_plans, split
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.strategies import offered
from asa.strategies.sequence import SequenceParallel
from planner_tests.hand_plans import hand_plan, model_of, traced, uniform
from planner_tests.small_models import INPUT, build
from planner_tests.stage_plans import staged
from planner_tests.verified import verified

TOKENS, WIDTH = 197, 768
CLUSTER = presets.load("a100-nvlink-8")
SHIPPED = Path(__file__).parent.parent / "profiles"


def encoder(tokens: int = TOKENS) -> Profile:
    """Encoder blocks that keep a quarter of their activations on every rank, and what tokens divide of it."""
    graph = known_models.transformer(4, tokens=tokens)
    size = 4.0 * tokens * WIDTH
    ways: tuple[tuple[Any, Any], ...] = (("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"))
    moved = [
        InnerCollective(op=op, phase=phase, bytes_per_sample=size)
        for pair in 2 * ways
        for op, phase in zip(pair, ("forward", "backward"), strict=True)  # type: ignore[arg-type]
    ]
    by_tokens = SequenceSplit(
        tokens=tokens, exit=True, collectives=tuple(moved), summed_parameter_bytes=16 * WIDTH,
        saved_bytes_per_sample=3 * size,
    )  # fmt: skip

    def with_tokens(c: Any) -> Any:
        if not c.name.startswith("encoder"):
            return c
        split = replace(c.split, saved_bytes_per_sample=12 * size, collectives=(), sequence=by_tokens)
        return replace(c, split=split)

    components = tuple(with_tokens(c) for c in graph.components)
    return known_models.profile(replace(graph, components=components), 500.0, 64)


def kinds(found: Plan) -> set[str]:
    return {c.tensor.strategy for c in found.components if c.name.startswith("encoder")}


def ask(**wishes: Any) -> Plan:
    return plan(encoder(), CLUSTER, offered(), Request(gpus=4, global_batch=64, **wishes))[0]


def test_by_name_it_is_a_whole_strategy_that_holds_less() -> None:
    cut, plain = ask(strategies=("sequence",)), ask(strategies=("tensor",))
    assert (cut.strategy, kinds(cut), kinds(plain)) == ("sequence", {"sequence"}, {"tensor"})
    assert {c.tensor.strategy for c in cut.components} == {"sequence", "none", "tensor"}
    size = 4.0 * TOKENS * WIDTH * 64
    spared = plain.prediction.memory_bytes_per_rank[0] - cut.prediction.memory_bytes_per_rank[0]
    # Four blocks, three tensors each, of which 50 of 197 tokens stay.
    assert 0.7 < spared / (4 * 3 * size * (1 - 50 / 197)) < 1.1
    assert codec.loads(Plan, codec.dumps(cut), source="text") == cut
    assert all(x.sequence for x, c in zip(cut.layouts(), cut.components, strict=True) if "encoder" in c.name)


def test_unasked_it_is_not_searched_without_times_and_asked_it_never_makes_the_answer_worse() -> None:
    usual, wider = ask(), ask(strategies=("asa", "sequence"))
    assert "sequence" not in kinds(usual) | {b.name for b in usual.baselines}
    assert "sequence" not in usual.certificate.space
    assert "tensor, sequence" in wider.certificate.space
    assert wider.prediction.step_time_s <= usual.prediction.step_time_s * (1 + 1e-9)


def test_pins_hold_it_and_it_can_be_asked_about() -> None:
    found = ask(pins=(parse_pin("encoder.*=sequence@2"),))
    assert kinds(found) == {"sequence"}
    assert {c.tensor.degree for c in found.components if "encoder" in c.name} == {2}
    taken = explain(found, encoder(), CLUSTER, offered())
    assert taken.components[1].tensor == TensorDegree(strategy="sequence", degree=2)
    rival = why_not(ask(), encoder(), CLUSTER, offered(), "encoder.1=sequence@4")
    assert rival.other_s is not None
    with pytest.raises(InfeasibleError, match="pinned"):
        ask(pins=(parse_pin("head=sequence@2"),))


def test_it_is_chosen_where_memory_binds() -> None:
    """Four ranks with the same samples: nothing else divides what tensor parallelism leaves whole."""
    few = replace(offered(), checkpoint=False, schedules=dict[str, Schedule]())

    def least(*strategies: str, memory_bytes: int | None = None) -> Plan:
        pins = (parse_pin("*=replicate@1"),)
        request = Request(gpus=4, global_batch=1, strategies=strategies, memory_bytes=memory_bytes, pins=pins)
        return plan(large, CLUSTER, few, request)[0]

    large = encoder(20_000)
    plain, cut = least("tensor"), least("sequence")
    sizes = [max(p.prediction.memory_bytes_per_rank) for p in (cut, plain)]
    assert sizes[0] < sizes[1]
    room = needed(CLUSTER.device, sum(sizes) / 2, 4)
    assert "sequence" in kinds(least("asa", "sequence", memory_bytes=room))
    with pytest.raises(InfeasibleError):
        least("asa", memory_bytes=room)


def timed(profile: Profile, factor: float) -> Profile:
    """With shards of cut tokens measured to take so many times as long as others."""

    def scaled(stat: Stat) -> Stat:
        return replace(stat, median=factor * stat.median, p10=factor * stat.p10, p90=factor * stat.p90)

    found = [t for t in profile.timings if t.tensor_degree > 1 and t.component.startswith("encoder")]
    by_tokens = tuple(replace(t, forward=scaled(t.forward), backward=scaled(t.backward)) for t in found)
    return replace(profile, by_tokens=by_tokens)


def test_measured_times_of_cut_tokens_are_priced_and_bound_the_search() -> None:
    plain, asked = encoder(), Request(gpus=4, global_batch=64, strategies=("sequence",))
    (usual,), (fast,) = (plan(p, CLUSTER, offered(), asked) for p in (plain, timed(plain, 0.5)))
    assert fast.prediction.compute_s < 0.8 * usual.prediction.compute_s
    assert fast.prediction.memory_bytes_per_rank == usual.prediction.memory_bytes_per_rank
    found = plan(timed(plain, 0.01), CLUSTER, offered(), replace(asked, strategies=("asa", "sequence")))[0]
    assert "sequence" in kinds(found)
    assert found.certificate.lower_bound_s <= found.prediction.step_time_s
    slow = slower_profile(timed(plain, 0.5), 2.0).by_tokens
    assert slow is not None
    assert [t.forward.median for t in slow] == [t.forward.median for t in timed(plain, 1.0).by_tokens or ()]


def test_unasked_it_is_searched_where_shards_were_measured() -> None:
    few = replace(offered(), checkpoint=False, schedules=dict[str, Schedule]())
    pins = (parse_pin("*=replicate@1"),)
    large = encoder(20_000)

    def least(profile: Profile, memory_bytes: int | None, *strategies: str) -> Plan:
        request = Request(
            gpus=4, global_batch=1, memory_bytes=memory_bytes, pins=pins, strategies=strategies or None
        )  # fmt: skip
        return plan(profile, CLUSTER, few, request)[0]

    sizes = [max(least(large, None, s).prediction.memory_bytes_per_rank) for s in ("tensor", "sequence")]
    room = needed(CLUSTER.device, sum(sizes) / 2, 4)
    assert "sequence" in kinds(least(timed(large, 1.0), room))
    assert "sequence" not in kinds(least(timed(large, 1.0), None))
    with pytest.raises(InfeasibleError):
        least(large, room)


def test_more_memory_is_never_slower() -> None:
    """A plan that fits in less memory fits in more, so it bounds the answer there, and what is proved there."""
    profile = codec.load(Profile, SHIPPED / "vit_b_16.cpu.fp32.json")  # cut tokens were measured to be faster
    cluster = codec.load(Cluster, SHIPPED / "cluster.local-gloo-2.json")
    request = Request(gpus=2, global_batch=64)

    def prices(memory_bytes: int | None) -> Prices:
        wanted = replace(request, memory_bytes=memory_bytes)
        return Prices(Space(on_device(profile, cluster), cluster, offered(), wanted))

    stock = prices(None).of(uniform_ways("ddp", prices(None), 1)).peak.total
    fastest_s = float("inf")
    for share in (0.5, 0.7, None):
        room = None if share is None else needed(cluster.device, share * stock, request.gpus)
        answer = search(prices(room), solver="dp", time_limit_s=60.0)
        assert answer.best is not None
        step_s = prices(room).of(answer.best).cost.total_s
        assert step_s <= fastest_s * (1 + 1e-6)
        fastest_s = min(fastest_s, step_s)
        assert answer.lower_bound_s <= fastest_s * (1 + 1e-6)


def test_the_profiler_times_shards_whose_tokens_are_cut() -> None:
    found = profile_module(
        build("vision_transformer"), torch.zeros((2, *INPUT)), spec="model", num_classes=10, global_batch=4,
        device=torch.device("cpu"), time_limit_s=60.0, max_tensor_degree=2,
    )  # fmt: skip
    assert found.by_tokens is not None
    by_name = {c.name: c.split for c in found.graph.components}
    cut = {name for name, s in by_name.items() if s is not None and s.sequence is not None}
    assert {t.component for t in found.by_tokens if t.microbatch == 4} == cut
    assert {t.tensor_degree for t in found.by_tokens} == {2}
    assert codec.loads(Profile, codec.dumps(found), source="text") == found


def test_a_profile_without_it_is_refused_by_name() -> None:
    component = known_models.transformer(1).components[1]
    assert "profile is old" in SequenceParallel().refusal(component, 2)
    old = known_models.profile(known_models.transformer(2), 500.0, 64)
    with pytest.raises((InfeasibleError, UsageError), match="cut by tokens"):
        plan(old, CLUSTER, offered(), Request(gpus=4, global_batch=64, strategies=("sequence",)))


def test_old_files_of_a_graph_stay_as_they_are() -> None:
    old = codec.dumps(known_models.profile(known_models.transformer(1), 500.0, 64))
    assert '"sequence"' not in old
    assert codec.loads(Profile, codec.dumps(encoder()), source="text") == encoder()


class Handmade(nn.Module):
    """Attention by reshapes: every head needs all tokens, and the walk cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


def test_what_needs_all_tokens_keeps_them() -> None:
    for model, shape in ((Handmade(), (6, 8)), (build("perceptron"), INPUT)):
        assert all(sequence_plans(c) is None for c in traced(model, shape).components)
    first, last = traced(build("vision_transformer"), INPUT).components[1:3]
    for component, leaves in ((first, 5), (last, 0)):
        split = tensor_split(component)[0]
        assert split is not None
        assert split.sequence is not None
        assert (split.sequence.tokens, split.sequence.exit_tokens) == (5, leaves)


@pytest.mark.parametrize("index", [0, 1])
def test_parameters_lie_as_under_tensor_parallelism_and_masks_as_their_tokens(index: int) -> None:
    component = traced(build("vision_transformer"), INPUT).components[1]
    make_reproducible([component], SampleContext())
    shapes = []
    for tokens in (False, True):
        cut = split(detached_copy(component, "cpu"), Axis(size=2, index=index), tokens=tokens)
        shapes.append({name: tuple(p.shape) for name, p in cut.named_parameters()})
        drops = {path: m.shard for path, m in cut.named_modules() if isinstance(m, SampleDropout)}
        own = {path for path, shard in drops.items() if shard == (1, 2 * index, 5)}
        assert {path.rsplit(".", 1)[-1] for path in own} == ({"dropout", "4"} if tokens else set())
    assert shapes[0] == shapes[1]
    y = cut(torch.randn(2, 2 + index, 24))[0]
    assert y.shape == (2, 2 + index, 24)


def test_stages_hand_over_whole_tokens_and_recompute_cut_ones() -> None:
    alone = hand_plan(model_of("vision_transformer"), 2, uniform(1, 2), input_shape=INPUT, num_classes=10)
    base = staged(alone, [2, 1], cuts=[2], microbatches=2, degrees=lambda _i, width: (1, width))

    def cut(c: Any) -> Any:
        return replace(c, tensor=TensorDegree(strategy="sequence", degree=2), checkpoint=True)

    made = replace(base, components=(base.components[0], cut(base.components[1]), *base.components[2:]))
    assert [c.tensor.strategy for c in made.components] == ["tensor", "sequence", "none", "none"]
    found = verified(made, "vision_transformer")
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
