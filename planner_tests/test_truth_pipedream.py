"""PipeDream's profiles and its recurrence: bad files, brute force on small graphs, published optima."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from asa.errors import InvalidInputError, UsageError
from benchmarks.truth import pipedream
from benchmarks.truth.downsets import downsets, topological
from benchmarks.truth.pipedream import Layer, Workload, load, optimum, parse

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth"
here = pytest.mark.skipif(not TRUTH.is_dir(), reason="the public measurements (../shared/truth) are not here")


def node(name: str, description: str = "Linear", forward: str = "1.0", parameters: str = "8.0") -> str:
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time=2.0, "
        f"activation_size=16.0, parameter_size={parameters}"
    )


GOOD = "\n".join([node("a", "Input0"), node("b"), node("c"), node("d"), "\ta -- b", "\tb -- c", "\tb -- d", "\tc -- d"])


def test_the_input_is_dropped_and_times_are_seconds():
    made = parse(GOOD, source="it")
    assert [layer.name for layer in made.layers] == ["b", "c", "d"]
    assert made.edges == ((0, 1), (0, 2), (1, 2))
    assert made.layers[0].seconds == pytest.approx(3e-3)


def test_outputs_of_one_layer_are_added_up():
    made = parse(GOOD.replace("activation_size=16.0", "activation_size=[10.0; 4.0; 2.5]", 3), source="it")
    assert [layer.activation_bytes for layer in made.layers] == [16.5, 16.5, 16.0]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (GOOD.replace("activation_size=16.0", "activation_size=[10.0; many]"), "line 1"),
        (GOOD.replace(node("c"), node("c", forward="nan")), "line 3"),
        (GOOD.replace(node("c"), node("c", forward="inf")), "line 3"),
        (GOOD.replace(node("c"), node("c", parameters="-1")), "line 3"),
        (GOOD.replace(node("c"), node("c", forward="quick")), "line 3"),
        (GOOD.replace(node("c"), node("c")[:60]), "line 3"),
        (GOOD.replace(node("c"), node("b")), "line 3"),
        (GOOD[:-4], "line 8"),
        (GOOD.replace("\tb -- c", "\tb -- z"), "line 6"),
        ("\n".join(GOOD.split("\n")[:5]), "node c"),
        (GOOD + "\n\td -- b", "node"),
        ("", "line 1"),
        (node("a", "Input"), "line 1"),
    ],
)
def test_a_bad_profile_is_refused_with_the_place(text, where):
    with pytest.raises(InvalidInputError) as caught:
        parse(text, source="it")
    assert caught.value.exit_code == 3
    assert where in (caught.value.where or "")


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read"):
        load(tmp_path / "none.txt")


def test_too_many_ways_to_cut_are_refused():
    with pytest.raises(InvalidInputError, match="more than 1,000 ways"):
        downsets(20, [], source="it", most=1000)


def test_downsets_of_known_graphs():
    assert len(downsets(5, [(i, i + 1) for i in range(4)], source="chain")) == 6
    assert len(downsets(4, [(0, 1), (2, 3)], source="two chains")) == 9
    assert len(downsets(70, [(i, i + 1) for i in range(69)], source="more than a word")) == 71
    found = downsets(3, [(0, 2), (1, 2)], source="it")
    assert [sorted(map(int, row.nonzero()[0])) for row in found.inside] == [[], [0], [1], [0, 1], [0, 1, 2]]


def test_a_topological_order_takes_the_lowest_number_first():
    assert topological("abcd", [(3, 0), (0, 2)], source="it") == [1, 3, 0, 2]


def orders(nodes: tuple[int, ...], edges) -> list[list[set[int]]]:
    """Every way to cut a graph into stages, in order."""
    found = []
    for places in product(range(len(nodes)), repeat=len(nodes)):
        count = max(places) + 1
        if set(places) == set(range(count)) and all(places[u] <= places[v] for u, v in edges):
            found.append([{v for v in nodes if places[v] == i} for i in range(count)])
    return found


def brute_force(workload: Workload, devices: int, bandwidth: float, activations: bool) -> float:
    best = float("inf")
    for stages in orders(tuple(range(len(workload.layers))), workload.edges):
        for replicas in product(range(1, devices + 1), repeat=len(stages)):
            if sum(replicas) != devices:
                continue
            worst, done = 0.0, set()
            for stage, m in zip(stages, replicas, strict=True):
                sent = sum(
                    workload.layers[u].activation_bytes
                    for u in done
                    if any(a == u and b not in done for a, b in workload.edges)
                )
                work = sum(workload.layers[v].seconds for v in stage)
                weights = sum(workload.layers[v].parameter_bytes for v in stage)
                worst = max(worst, (work + 4 * (m - 1) * weights / (bandwidth * m)) / m)
                if activations:
                    worst = max(worst, 2 * sent / (bandwidth * m))
                done |= stage
            best = min(best, worst)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_recurrence_finds_what_brute_force_finds(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 5)
    edges = tuple((u, v) for u in range(count) for v in range(u + 1, count) if draw.random() < 0.5)
    layers = tuple(
        Layer(str(i), "", draw.uniform(0.1, 2), draw.uniform(0, 3), draw.choice([0.0, 1.0, 5.0])) for i in range(count)
    )
    workload = Workload(layers, edges)
    for devices, activations in product((1, 2, 4), (False, True)):
        found = optimum(workload, devices, 4.0, activations=activations)
        assert found.seconds == pytest.approx(brute_force(workload, devices, 4.0, activations), rel=1e-12)
        assert sum(stage.replicas for stage in found.stages) == devices
        assert sorted(v for stage in found.stages for v in stage.layers) == list(range(count))


def test_nonsense_devices_are_refused():
    workload = parse(GOOD, source="it")
    for devices, bandwidth in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(UsageError):
            optimum(workload, devices, bandwidth, activations=True)


@here
@pytest.mark.parametrize(
    ("model", "devices", "bandwidth", "activations", "expected", "exact"),
    [
        ("vgg16", 4, 1e9, False, 0.175732624, 1e-9),
        ("vgg16", 8, 1e11, False, 0.0857448997, 1e-9),
        ("vgg16", 4, 1e9, True, 0.205520896, 1e-9),
        ("resnet50", 4, 1e9, False, 0.111497, 1e-9),
        ("resnet50", 4, 1e9, True, 0.162881, 1e-6),  # known to six places
    ],
)
def test_published_optima(model, devices, bandwidth, activations, expected, exact):
    found = optimum(load(TRUTH / "pipedream" / f"{model}.txt"), devices, bandwidth, activations=activations)
    assert found.seconds == pytest.approx(expected, abs=exact)


@here
def test_transfers_of_vgg16_cost_a_split_of_three_and_one():
    found = optimum(load(TRUTH / "pipedream" / "vgg16.txt"), 4, 1e9, activations=True)
    assert [stage.replicas for stage in found.stages] == [3, 1]


def test_the_module_says_whose_recurrence_it_is():
    assert "PipeDream" in (pipedream.__doc__ or "")
