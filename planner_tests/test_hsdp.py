"""Sharded inside a node, replicated across: declared, priced by the right links, chosen, and run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import known_models
import nouns
import pytest
import training

from asa.cost.machine import presets
from asa.cost.traffic.collectives import Links
from asa.errors import InfeasibleError, InvalidInputError
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint
from asa.ir import codec
from asa.ir.cluster import Cluster, Level
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, Plan
from asa.ir.traffic import Adjacent, Collective
from asa.launch import run_ranks
from asa.planner import Request, parse_pin, plan, why_not
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.scheduler import adapt
from asa.strategies import offered
from asa.strategies.hsdp import HybridShard
from asa.strategies.zero3 import FullyShard
from planner_tests.test_strategy_contract import graph_of
from planner_tests.test_zero import CLASSES, STRATEGIES, _third_step, plan_of  # noqa: F401
from planner_tests.verified import verified


def hybrid(plan: Plan, shards: int = 2, only: Any = lambda _i: True) -> Plan:
    """``plan`` with the state of its data parallel components sharded over ``shards`` neighbours."""

    def choice(i: int, data: DataDegree) -> DataDegree:
        spans = data.degree > shards and only(i)
        return replace(data, strategy="hsdp", shards=shards) if spans else data

    return replace(plan, components=tuple(replace(c, data=choice(i, c.data)) for i, c in enumerate(plan.components)))


def two_nodes(each: int = 2, slower: float = 20.0) -> Cluster:
    """Two nodes of ``each`` ranks; links between them take ``slower`` times as long."""
    near = nouns.cluster(2 * each)
    tables = near.levels[0].tables
    far = tuple(replace(t, points=tuple((size, slower * s) for size, s in t.points)) for t in tables)
    inside = tuple(t for t in tables if t.ranks <= each)
    return replace(
        near,
        levels=(
            Level(name="inside", devices=each, tables=inside),
            Level(name="across", devices=2 * each, tables=far),
        ),
    )


def test_groups_are_neighbours_and_the_same_part_of_others() -> None:
    layout = Layout(width=8, data=4, tensor=2)
    assert layout.data_group(3) == (1, 3, 5, 7)
    assert (layout.inside_group(3, 2), layout.across_group(3, 2)) == ((1, 3), (3, 7))
    for rank in range(8):
        assert set(layout.inside_group(rank, 2)) & set(layout.across_group(rank, 2)) == {rank}


@pytest.mark.parametrize("choice", [("hsdp", 4, None), ("zero3", 4, 2), ("hsdp", 4, 4), ("hsdp", 6, 4), ("hsdp", 4, 1)])
def test_a_choice_that_makes_no_sense_is_no_choice(choice: Any) -> None:
    name, degree, shards = choice
    with pytest.raises(ValueError, match="hsdp"):
        DataDegree(strategy=name, degree=degree, shards=shards)


def test_a_plan_file_keeps_its_shards_and_refuses_wrong_ones() -> None:
    made = hybrid(plan_of("plain", [4], "zero3"))
    made = replace(made, prediction=replace(made.prediction, memory_bytes_per_rank=(1,) * made.num_ranks))
    text = codec.dumps(made)
    assert codec.loads(Plan, text, source="text") == made
    with pytest.raises(InvalidInputError, match="hsdp over 4"):
        codec.loads(Plan, text.replace('"shards": 2', '"shards": 3'), source="text")


def test_state_is_that_of_a_group_and_never_rises() -> None:
    for component in graph_of("blocks").components:
        share = STRATEGIES.tensor["none"].share(component, 1)
        page = HybridShard(4)
        assert page.traffic(share, 1, 1) == ()
        states = [page.memory(share, d, "adamw").state + page.memory(share, d, "adamw").gradients for d in (1, 2, 4, 8)]
        assert states == sorted(states, reverse=True)
        assert page.memory(share, 8, "adamw") == FullyShard().memory(share, 4, "adamw")
        beside = Adjacent(front=1e4, behind=2e4, rest=5e4, saved=3e3, copying=True)
        assert page.transient(share, 8, beside) == FullyShard().transient(share, 4, beside)
        if share.parameter_bytes:
            assert {(c.op, c.ranks, c.stride) for c in page.traffic(share, 8, 2)} == {
                ("all_gather", 4, 2), ("reduce_scatter", 4, 2), ("all_reduce", 2, 8),
            }  # fmt: skip


def test_each_collective_is_priced_on_its_own_links() -> None:
    cluster, profile = two_nodes(), nouns.profile()
    space = Space(profile, cluster, offered(), Request(gpus=4, global_batch=8))
    layout = Layout(width=4, data=4, tensor=1)
    ways = {w.data.strategy: w for w in space.ways(2, 4, 1) if w.layout == layout and not w.checkpoint}
    pricer = Prices(space).pricer(4, 1)
    found, whole = pricer.component(2, ways["hsdp"]), pricer.component(2, ways["zero3"])
    size = float(profile.graph.components[2].parameter_bytes)
    links = Links(cluster, 4)
    gathered = links.seconds(Collective(op="all_gather", phase="forward", bytes=size, ranks=2))
    scattered = links.seconds(Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=2))
    reduced = links.seconds(Collective(op="all_reduce", phase="gradient", bytes=size / 2, ranks=2, stride=2))
    assert found.forward_communication_s == found.backward_communication_s == pytest.approx(gathered)
    assert found.sync_s == 0, "on a CPU backward waits for it"
    assert found.update_communication_s == pytest.approx(scattered + reduced)
    assert reduced > 5 * scattered, "the all_reduce crosses the slow links"
    assert found.forward_communication_s < 0.2 * whole.forward_communication_s
    assert found.footprint.state > whole.footprint.state


def test_it_is_in_the_space_where_a_group_spans_nodes() -> None:
    def widths(cluster: Cluster, **wishes: Any) -> set[tuple[int, int | None]]:
        space = Space(nouns.profile(), cluster, offered(), Request(gpus=4, global_batch=8, **wishes))
        every = [w for width in (2, 4) for w in space.ways(2, width, 1)]
        return {(w.data.degree, w.data.shards) for w in every if w.data.strategy == "hsdp"}

    assert widths(two_nodes()) == {(4, 2)}
    assert widths(nouns.cluster(4)) == set()
    assert widths(nouns.cluster(4), pins=(parse_pin("head=hsdp@4"),)) == {(4, 2)}


def test_it_wins_where_links_between_nodes_are_slow_and_memory_is_tight() -> None:
    profile = known_models.profile(known_models.transformer(), 500.0, 64)
    cluster = presets.load("v100-2x8-25g-tcp")
    free = Request(gpus=16, global_batch=256, optimizer="adamw", strategies=("ddp", "fsdp", "hsdp"))
    found = plan(profile, cluster, offered(), free)[0]
    rows = {b.name: b for b in found.baselines}
    sizes = [float(rows[n].memory_bytes_max or 0) for n in ("fsdp", "hsdp", "ddp")]
    times = {n: float(rows[n].step_time_s or 0) for n in ("fsdp", "hsdp")}
    assert sizes == sorted(set(sizes)), (
        "a copy in every node takes more than one in all, and less than one in each rank"
    )
    assert times["hsdp"] < 0.6 * times["fsdp"], "weights are gathered inside nodes"
    assert found.strategy == "hsdp"
    weighty = {c.name for c in profile.graph.components if c.parameter_bytes}
    assert {c.data.shards for c in found.components if c.name in weighty} == {8}


def test_pins_hold_it_and_one_node_of_two_has_no_room() -> None:
    profile = nouns.profile()
    found = plan(profile, two_nodes(), offered(), Request(gpus=4, global_batch=8, pins=(parse_pin("*=hsdp@4"),)))[0]
    assert {c.data.text for c in found.components} == {"hsdp x4 (shards of 2)"}
    with pytest.raises(InfeasibleError, match="cannot run as pinned"):
        plan(profile, two_nodes(), offered(), Request(gpus=4, global_batch=8, pins=(parse_pin("head=hsdp@2"),)))
    alone = plan(profile, nouns.cluster(4), offered(), Request(gpus=4, global_batch=8))[0]
    row = next(b for b in alone.baselines if b.name == "hsdp")
    assert not row.fits
    assert row.why_not == "needs several nodes, or 4 or more devices of one node where it is asked for by name"
    asked = plan(profile, nouns.cluster(4), offered(), Request(gpus=4, global_batch=8, strategies=("hsdp",)))[0]
    assert {c.data.shards for c in asked.components} == {2}
    found = why_not(alone, profile, nouns.cluster(4), offered(), "hsdp")
    assert found.other_s == pytest.approx(asked.prediction.step_time_s), "here it is asked for by name, too"


def test_presets_of_several_nodes_shard_over_a_node() -> None:
    cluster = presets.load("a100-2x8-ib")
    space = Space(nouns.profile(), cluster, offered(), Request(gpus=16, global_batch=64))
    assert space.shards(Layout(width=16, data=16, tensor=1)) == 8
    assert space.shards(Layout(width=16, data=8, tensor=2)) == 4
    assert space.shards(Layout(width=8, data=8, tensor=1)) is None


def test_training_is_that_of_one_device() -> None:
    """Dimensions that do not divide, several microbatches."""
    made = hybrid(plan_of("plain", [4], "zero3", optimizer="adamw", microbatches=3))
    found = verified(made, "plain", even=True)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_beside_other_strategies_tensors_and_offload_in_one_network() -> None:
    base = plan_of(
        "blocks", [4], lambda i: ("zero3", "zero1")[i % 2], degrees=lambda i, _w: [(4, 1), (2, 2)][i % 3 == 2],
        microbatches=1,
    )  # fmt: skip
    made = hybrid(base, only=lambda i: i % 2 == 0)
    made = replace(made, components=tuple(replace(c, offload=i % 4 == 0) for i, c in enumerate(made.components)))
    assert {c.data.strategy for c in made.components} >= {"hsdp", "zero1"}
    assert verified(made, "blocks", even=True).equivalent


def test_what_is_declared_is_what_runs() -> None:
    """Also what stays of weights and optimizer state."""
    microbatches = 2
    made = hybrid(plan_of("plain", [4], "zero3", microbatches=microbatches, degrees=lambda _i, w: (w, 1)))
    said, weights, state = Counter[str](), 0.0, 0.0
    for component in graph_of("plain").components:
        share = STRATEGIES.tensor["none"].share(component, 1)
        held = HybridShard(2).memory(share, 4, "sgd")
        weights, state = weights + held.parameters, state + held.optimizer
        for c in HybridShard(2).traffic(share, 4, 1):
            said[c.op] += round(c.bytes) * (microbatches if c.phase in ("forward", "backward") else 1)
    ran = run_ranks(4, _third_step, made, "plain", threads=1, timeout_s=120)
    assert ran == [(dict(said), state, weights)] * 4


def test_a_reduction_left_out_across_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.strategies import hsdp

    def inside_only(self: HybridShard, module: Any, axis: Any) -> Any:
        from asa.sharding.gradients.sharded import sharded

        return sharded(module, axis.parts[0], release=True)

    monkeypatch.setattr(hsdp.HybridShard, "apply", inside_only)
    made = hybrid(plan_of("perceptron", [4], "zero3"))
    assert not verified(made, "perceptron", even=True).equivalent


def test_runs_are_continued_under_and_after_it(tmp_path: Path) -> None:
    make: dict[str, Any] = {"strategies": STRATEGIES, "adapt": adapt}
    usual: dict[str, Any] = {"steps_per_epoch": 2, "lr": 0.01, "warmup": 0.0}
    base = training.plan("logistic", ranks=4, optimizer="adamw")
    sharded = replace(
        base, components=tuple(replace(c, data=replace(c.data, strategy="zero3")) for c in base.components)
    )
    for epochs, made in enumerate((hybrid(base), sharded, hybrid(base)), start=1):
        settings = training.settings(tmp_path, epochs=epochs, resume=epochs > 1, **usual)
        result = train(made, settings, **make)
        assert len(result["epochs"]) == epochs
        found = checkpoint.find(tmp_path / outdir.CHECKPOINTS)
        moments = checkpoint.read(found.path, checkpoint.OPTIMIZER)
        assert {n.rsplit("/", 1)[0] for n in moments} == set(checkpoint.read(found.path, checkpoint.MODEL))
        assert all(float(v) == 2 * epochs for n, v in moments.items() if n.endswith("/step"))
    losses = [e["train_loss"] for e in result["epochs"]]
    assert losses[-1] < losses[0]
