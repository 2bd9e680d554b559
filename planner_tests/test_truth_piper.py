"""Piper's workloads: bad files, the knapsack and the search against brute force, the published workload."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from asa.errors import InfeasibleError, InvalidInputError
from benchmarks.truth import knapsack, piper
from benchmarks.truth.piper import Edge, Node, Stage, Variant, Workload
from benchmarks.truth.piper_search import solve

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth"
here = pytest.mark.skipif(not TRUTH.is_dir(), reason="the public measurements (../shared/truth) are not here")


def document() -> dict:
    def variant(name: str, ins: dict, outs: dict, time: float) -> dict:
        return {
            "id": name, "timePerSample": time, "parameterSize": 8.0, "memoryUsageA": 4.0, "memoryUsageB": 2.0,
            "syncTimeFw": ins, "syncTimeBw": outs,
        }  # fmt: skip

    return {
        "maxDevices": 2,
        "maxMemoryPerDevice": 1e3,
        "bandwidth": 10.0,
        "mbsInBatch": 4,
        "nodes": [
            {"id": 7, "name": "second", "TMPCs": {"1": [variant("vanilla", {"3": 0.0}, {}, 2.0)]}},
            {"id": 3, "name": "first", "TMPCs": {"1": [variant("vanilla", {}, {"7": 1.0}, 1.0)]}},
        ],
        "edges": [{"sourceId": 3, "destId": 7, "communicationCost": 5.0}],
    }


def test_nodes_come_in_topological_order():
    made = piper.parse(json.dumps(document()), source="it")
    assert [n.name for n in made.nodes] == ["first", "second"]
    assert made.edges == (Edge(0, 1, 5.0),)
    assert made.nodes[0].variants[1][0].sync_out == {1: 1.0}
    found = solve(made)
    # One stage of two replicas: (1 + 2) / 2 + 2 * 4 * 8 / (2 * 4) / 10; two stages are slower by their transfers.
    assert found.time == pytest.approx(1.5 + 2 * 4 * 8 / (2 * 4) / 10)


def broken(change) -> str:
    data = document()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (json.dumps(document())[:-30], "line 1 column"),
        (json.dumps(document())[:200], "line 1 column"),
        ("[1, 2]", "$"),
        (broken(lambda d: d.update(bandwidth=float("nan"))), "$.bandwidth"),
        (broken(lambda d: d.update(maxDevices=2.5)), "$.maxDevices"),
        (broken(lambda d: d.update(mbsInBatch=0)), "$.mbsInBatch"),
        (broken(lambda d: d.update(nodes=[])), "$.nodes"),
        (broken(lambda d: d.pop("edges")), "$"),
        (broken(lambda d: d["nodes"][1]["TMPCs"]["1"][0].update(timePerSample=float("nan"))),
         "$.nodes[1].TMPCs.1[0].timePerSample"),
        (broken(lambda d: d["nodes"][1]["TMPCs"]["1"][0].update(memoryUsageA=-1)),
         "$.nodes[1].TMPCs.1[0].memoryUsageA"),
        (broken(lambda d: d["nodes"][1]["TMPCs"]["1"][0].update(syncTimeBw={})), "$.nodes[1].TMPCs.1[0].syncTimeBw"),
        (broken(lambda d: d["nodes"][1].update(TMPCs={"1": []})), "$.nodes[1].TMPCs"),
        (broken(lambda d: d["nodes"][1].update(TMPCs={"x": []})), "$.nodes[1].TMPCs.x"),
        (broken(lambda d: d["nodes"][0].update(id=3)), "$.nodes[1].id"),
        (broken(lambda d: d["edges"][0].update(destId=9)), "$.edges[0].destId"),
        (broken(lambda d: d["edges"].append(d["edges"][0])), "$.edges[1]"),
        (broken(lambda d: d["edges"].append({"sourceId": 7, "destId": 3, "communicationCost": 0})), "node"),
    ],
)  # fmt: skip
def test_a_bad_workload_is_refused_with_the_place(text, where):
    with pytest.raises(InvalidInputError) as caught:
        piper.parse(text, source="it")
    assert caught.value.exit_code == 3
    assert (caught.value.where or "").startswith(where)


def test_the_exact_knapsack_is_brute_force_and_never_worse_than_the_greedy():
    draw = random.Random(5)
    better = 0
    for _ in range(150):
        nodes = [
            [(i * draw.uniform(1, 9), draw.uniform(1, 9) / (1 + i)) for i in range(draw.choice([1, 2, 2, 2, 3]))]
            for _ in range(draw.randint(3, 8))
        ]
        limit = draw.uniform(0.5, 0.9) * sum(max(m for _, m in node) for node in nodes)
        best = min(
            (sum(t for t, _ in pick) for pick in product(*nodes) if sum(m for _, m in pick) <= limit),
            default=float("inf"),
        )
        exact, greedy = knapsack.exact(nodes, limit), knapsack.greedy(nodes, limit)
        assert exact.time == pytest.approx(best, rel=1e-12)
        assert exact.time <= greedy.time
        for found in (exact, greedy):
            assert found == knapsack.NOTHING or found == knapsack.total(nodes, found.variants)
        better += exact.time < greedy.time
    assert better > 10, "the greedy rule is beaten now and then"


def workload(seed: int) -> Workload:
    draw = random.Random(seed)
    count = draw.randint(2, 5)
    pairs = [(u, v) for u in range(count) for v in range(u + 1, count) if draw.random() < 0.5]
    edges = tuple(Edge(u, v, draw.uniform(0, 4)) for u, v in pairs)

    def variant(v: int, name: str, tensor: int) -> Variant:
        recomputes = name == "recompute"
        return Variant(
            name,
            draw.uniform(1, 3) / tensor + recomputes,
            draw.uniform(0, 2),
            draw.uniform(1, 3) * (0.2 if recomputes else 1),
            draw.uniform(0, 1) / tensor,
            {a: draw.uniform(0, 1) for a, b in pairs if b == v},
            {b: draw.uniform(0, 1) for a, b in pairs if a == v},
        )

    def node(v: int) -> Node:
        degrees = [1] if draw.random() < 0.3 else [1, 2]
        return Node(str(v), {t: tuple(variant(v, name, t) for name in ("vanilla", "recompute")) for t in degrees})

    nodes = tuple(node(v) for v in range(count))
    return Workload(nodes, edges, draw.randint(2, 4), draw.uniform(3, 14), draw.uniform(3, 30), draw.choice([4, 6]))


def brute_force(w: Workload) -> float:
    """Every cut into stages, every pair of degrees, every choice of variants; the objective spelled out."""
    count, best = len(w.nodes), float("inf")

    def load(inside: list[int], d: int, t: int, behind: int) -> float:
        fastest = float("inf")
        for pick in product(*(w.nodes[v].variants.get(t, ()) for v in inside)):
            chosen = dict(zip(inside, pick, strict=True))
            memory = sum(p.memory_each * -(-behind // d) + p.memory_fixed for p in pick)
            if memory > w.memory_bytes:
                continue
            sent = 0.0
            for e in w.edges:
                if e.target in chosen and e.source not in chosen:
                    sent += 2 * (e.bytes + chosen[e.target].sync_in[e.source])
                if e.source in chosen and e.target not in chosen:
                    sent += 2 * (e.bytes + chosen[e.source].sync_out[e.target])
            synced = sum(4 * (d - 1) * p.parameter_bytes / d / w.microbatches for p in pick)
            fastest = min(fastest, sum(p.time for p in pick) / d + (sent / d + synced) / w.bandwidth)
        return fastest

    shapes = [(d, t) for d in range(1, w.devices + 1) for t in (1, 2) if d * t <= w.devices and w.microbatches % d == 0]
    for places in product(range(count), repeat=count):
        stages = max(places) + 1
        if set(places) != set(range(stages)) or any(places[e.source] > places[e.target] for e in w.edges):
            continue
        for degrees in product(shapes, repeat=stages):
            if sum(d * t for d, t in degrees) > w.devices or sum(d for d, _ in degrees) > w.microbatches:
                continue
            worst = 0.0
            for i, (d, t) in enumerate(degrees):
                behind = sum(x for x, _ in degrees[i:])
                worst = max(worst, load([v for v in range(count) if places[v] == i], d, t, behind))
                if worst >= best:
                    break
            best = min(best, worst)
    return best


@pytest.mark.parametrize("seed", range(25))
def test_the_search_finds_what_brute_force_finds(seed):
    w = workload(seed)
    best = brute_force(w)
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(w)
        return
    found = solve(w)
    assert found.time == pytest.approx(best, rel=1e-9)
    assert piper.value(w, found.stages) == pytest.approx(found.time, rel=1e-9)
    try:
        greedy = solve(w, fill=knapsack.greedy)
    except InfeasibleError:
        return
    assert found.time <= greedy.time * (1 + 1e-12)
    assert solve(w, known=greedy.time).time == pytest.approx(best, rel=1e-9)


def test_memory_that_holds_nothing_is_infeasible():
    with pytest.raises(InfeasibleError, match="no pipeline of 2 devices"):
        solve(replace(piper.parse(json.dumps(document()), source="it"), memory_bytes=1.0))


def test_a_pipeline_that_is_none_has_no_value():
    w = piper.parse(json.dumps(document()), source="it")
    first, second = Stage((0,), 1, 1, (0,)), Stage((1,), 1, 1, (0,))
    assert piper.value(w, (first, second)) > 0
    for stages in ((second, first), (first,), (replace(first, data=3), second), (replace(first, data=2), second)):
        with pytest.raises(InvalidInputError):
            piper.value(w, stages)
    assert piper.value(replace(w, memory_bytes=1.0), (first, second)) == float("inf")


@here
def test_the_published_workload_is_solved_at_least_as_well_as_by_the_greedy():
    given = piper.load(TRUTH / "piper" / "gnmt.json")
    assert (len(given.nodes), len(given.edges)) == (78, 104)
    greedy = solve(given, fill=knapsack.greedy)
    found = solve(given, known=greedy.time)
    assert found.downsets == 17_914
    assert found.time <= greedy.time
    assert piper.value(given, found.stages) == pytest.approx(found.time, rel=1e-12)
