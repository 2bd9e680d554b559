"""Bounds are never above the truth, brute force being the truth; one that is a little higher would be noticed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import joint_oracle
import known_models
import numpy as np
import pytest
import random_problems
from random_pipelines import RandomPipelines

from asa.cost.machine import presets
from asa.cost.pipeline import StageTimes, makespan
from asa.ir import control_groups
from asa.ir.units import GIB
from asa.planner import Request, plan
from asa.planner.parallel import Forked, can_fork
from asa.planner.pipeline import joint
from asa.planner.pipeline.skeletons import filled_up
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.pipeline.stages import Explorer
from asa.planner.pipeline.thinning import Room
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything, divisors
from asa.planner.stage import exhaustive, labels
from asa.planner.stage.formulate import formulate
from asa.planner.stage.lattice import Numbers
from asa.schedules import schedules
from asa.strategies import offered

INF = float("inf")


def problems(seed: int, count: int):
    rng = random.Random(seed)
    for _ in range(count):
        yield random_problems.draw(rng, components=rng.randint(1, 7), configs=5, most=400, tight=rng.random() < 0.7)


def test_prices_of_memory_and_overlap_give_bounds():
    closed = near = 0
    for problem in problems(3, 150):
        truth, solver = exhaustive.solve(problem), labels.Solver(problem)
        first = solver.bound
        solver.price()
        assert first <= solver.bound <= truth.value * (1 + 1e-9)
        assert solver.value >= truth.value * (1 - 1e-9)
        closed += solver.bound >= truth.value * (1 - 1e-6)
        near += truth.choice is not None and solver.bound * 1.05 > truth.value
        if solver.binds:
            free = exhaustive.solve(replace(problem, capacity=INF))
            assert truth.choice is None or truth.value > free.value * (1 + 1e-9)
    assert closed > 40
    assert near > 60, "five per cent more would be noticed"


def test_a_solver_goes_on_where_it_stopped():
    for problem in problems(4, 60):
        truth, solver = exhaustive.solve(problem), labels.Solver(problem)
        solver.price()
        bounds = [solver.bound]
        for _ in range(200):
            solver.run(INF, -1.0)  # time is up at once
            bounds.append(solver.bound)
        assert bounds == sorted(bounds)
        solver.run(INF, INF)
        found = solver.answer()
        assert (found.choice is None) == (truth.choice is None)
        assert found.value == pytest.approx(truth.value) or truth.choice is None
        assert solver.answer(cutoff=0.5 * truth.value).choice is None
        assert solver.bound <= truth.value * (1 + 1e-9)


def shares(most: int) -> list[float]:
    """Of true ways of running a stage, by how much the best point for each that is slower along no path through such a
    stage is below it, in parts of its time."""
    found = []
    for seed in range(12):
        pipelines = RandomPipelines(
            seed, components=4, gpus=4, most=2, speed=0.05, memory=(50, 2.5, 1.5)[seed % 3], strategies=2, sp=1.2,
            checkpoint=False,
        )  # fmt: skip
        chain = pipelines.chain(2, 2)
        numbers = Numbers(chain)
        points = Explorer(numbers, 2).explore(0, {4: Room(1e3, 1e4)}, most).get(4)
        degrees = divisors(2)
        for (forward, backward, longer, after), entry, leaving, _ in joint_oracle.stage(chain, 0, 4, 2):
            assert points is not None
            f, b, _, once = points.least
            same = (points.entry == degrees.index(entry.data)) & (points.exit == degrees.index(leaving.data))
            below = same & (f <= forward + 1e-9) & (b <= backward + 1e-9)
            below &= f + b + once <= forward + backward + longer + after + 1e-9
            assert below.any(), (seed, most)
            whole = 2 * (forward + backward) + longer + after
            found.append(1 - float((2 * (f + b) + once)[below].max()) / whole)
    return found


def test_rounded_and_merged_labels_stand_for_every_way_of_running_a_stage():
    exact, rounded, merged = shares(10_000), shares(12), shares(2)
    assert min(exact) == pytest.approx(0.0, abs=1e-9)
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) > 0, "the draw must round"
    assert sum(rounded) <= sum(merged)


def test_rounding_up_would_be_noticed(monkeypatch):
    monkeypatch.setattr("asa.planner.pipeline.thinning._ROUNDED", -0.2)
    with pytest.raises(AssertionError):
        shares(12)


@pytest.mark.parametrize(("cluster", "gib"), [("a100-nvlink-8", None), ("t4-8x1-25g-tcp", None), ("t4-8x1-25g-tcp", 3)])
def test_what_only_saves_memory_is_left_out_at_no_loss(cluster, gib):
    profile = known_models.profile(known_models.transformer(2), 500.0, 64)
    limit = None if gib is None else int(gib * GIB)
    request = Request(gpus=2, global_batch=8, memory_bytes=limit)
    prices = Prices(Space(profile, presets.load(cluster), offered(), request))
    few, all_ = formulate(prices, 2, 2, busy=2), formulate(prices, 2, 2, busy=2, every=True)
    assert few is not None
    assert all_ is not None
    count = [sum(map(len, x.chain.configs)) for x in (few, all_)]
    assert count[0] < count[1]
    found = [joint.search(StagedSpace(prices, anything, every=every)) for every in (False, True)]
    assert found[0].value == pytest.approx(found[1].value, rel=1e-9)
    assert found[0].bound == pytest.approx(found[1].bound, rel=1e-9)


def clocks(schedule: str, seed: int) -> tuple[float, float]:
    """The clock of a pipeline at random, and what is said of one that is filled up first."""
    rng = random.Random(seed)
    p, m = rng.randint(2, 5), rng.randint(1, 8)
    names = ("forward", "backward", "last_backward_extra", "after")
    times = [StageTimes(**{name: rng.choice([0.1, 1.0]) * rng.random() for name in names}) for _ in range(p)]
    moves = [(0.5 * rng.random(), 0.5 * rng.random()) for _ in range(p - 1)]
    trip = sum(t.forward + t.backward for t in times) + sum(map(sum, moves))
    ahead = max(*(t.forward for t in times), *(a for a, _ in moves))
    back = max(*(t.backward for t in times), *(b for _, b in moves))
    return makespan(times, moves, schedules()[schedule], m), filled_up(trip, ahead, back, m)


def test_a_pipeline_that_is_filled_up_first_takes_as_long_as_is_said():
    found = [clocks("gpipe", seed) for seed in range(300)]
    assert all(bound <= clock * (1 + 1e-9) for clock, bound in found)
    assert sum(bound >= 0.9 * clock for clock, bound in found) > 50
    assert any(bound > clock * 1.01 for clock, bound in (clocks("1f1b", seed) for seed in range(300)))


def test_two_halves_of_a_search_are_the_whole():
    for seed in range(6):
        pipelines = RandomPipelines(
            seed, components=3, gpus=3, most=8, speed=0.05, memory=(50, 1.5)[seed % 2], strategies=1
        )  # fmt: skip
        counts = pipelines.microbatches()
        halves = [joint.search(pipelines, floor=dict.fromkeys(counts[k::2], 0.0)) for k in (0, 1)]
        found, truth = joint.joined(*halves), joint_oracle.best(pipelines)
        assert found.value == pytest.approx(truth, rel=1e-9)
        assert found.bound == pytest.approx(truth, rel=1e-8)
        values, bounds = [v for _, v, _ in found.curve], [b for _, _, b in found.curve]
        assert values == sorted(values, reverse=True)
        assert bounds == sorted(bounds)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_second_core_changes_no_answer(monkeypatch):
    profile, links = known_models.profile(known_models.transformer(3), 500.0, 64), presets.load("t4-8x1-25g-tcp")
    request, found = Request(gpus=3, global_batch=32, time_limit_s=120.0, prefer_simple=False), []
    for beside in (False, True):
        monkeypatch.setattr("asa.planner.search.can_fork", lambda beside=beside: beside)
        found.append(plan(profile, links, offered(), request)[0])
    one, two = found
    assert len(one.stages) > 1
    assert one.prediction.step_time_s == pytest.approx(two.prediction.step_time_s, rel=0.005)
    for a, b in ((one, two), (two, one)):
        assert a.certificate.gap <= 0.005
        assert a.certificate.lower_bound_s <= b.prediction.step_time_s * (1 + 1e-9)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("apart", [False, True])
def test_work_beside_comes_back(apart):
    found = Forked(lambda: [x * x for x in range(100_000)], fork=apart)
    assert found.result()[-1] == 99_999**2
    found.stop()


def test_a_copy_that_comes_to_grief_is_made_up_for():
    began: list[int] = []

    def work() -> int:
        if not began:
            raise ValueError("only here")
        return 7

    found = Forked(work, fork=True)
    began.append(1)
    assert found.result() == 7
    Forked(lambda: list(range(10**7)), fork=True).stop()


def test_work_is_done_here_where_the_system_has_no_open_file_left(monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", none_left)
    found = Forked(lambda: 7, fork=True)
    assert found.has_ended()
    assert found.result() == 7


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities here")
def test_a_copy_needs_time_of_a_second_core(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota in (8, 1):
        monkeypatch.setattr(control_groups, "cores", lambda quota=quota: quota)
        assert can_fork() == (quota > 1)


_KILLED = """
import os, signal
from asa.planner.parallel import Forked
source, sink = os.pipe()
Forked(lambda: (os.write(sink, b"began"), signal.pause()), fork=True)
os.read(source, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_copy_ends_with_the_process_that_made_it():
    # It holds the output open, so this returns when it has ended, too.
    done = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("cluster", ["a100-nvlink-8", "h100-2x8-ib", "3090-pcie-8", "t4-8x1-25g-tcp"])
@pytest.mark.parametrize("graph", [known_models.transformer(3, 512), known_models.vgg16(64)], ids=["vit", "vgg16"])
def test_the_first_bound_of_a_component_is_below_every_way_and_counts_collectives(cluster, graph):
    asked = Request(gpus=8, global_batch=64)
    found = Prices(Space(known_models.profile(graph, 300.0, 64), presets.load(cluster), offered(), asked))
    for width in (1, 2, 4, 8):
        for m in (1, 4):
            pricer, bound_s = found.pricer(width, m), found.compute(width, m)
            menu = found.menu(pricer, anything)
            able = [found.space.enough(i, w.layout, m) for i, w in zip(menu.component.tolist(), menu.ways, strict=True)]
            which = np.flatnonzero(able)
            x = menu.priced(pricer, which)
            for k, seconds in zip(which.tolist(), (x.forward + x.backward).tolist(), strict=True):
                i, way = int(menu.component[k]), menu.ways[k]
                assert bound_s[i] <= seconds * (1 + 1e-9), (width, m, i, way)


def test_the_first_bound_counts_collectives_of_split_components():
    graph, asked = known_models.transformer(3, 512), Request(gpus=8, global_batch=64)
    found = Prices(Space(known_models.profile(graph, 300.0, 64), presets.load("a100-nvlink-8"), offered(), asked))
    bound_s = np.array(found.compute(8, 64))  # of one sample, so components are split
    compute_s = np.min([found.compute_on(1, t) for t in (1, 2, 4, 8)], axis=0)
    slower = bound_s[0] / compute_s[0]  # of an embedding, which cannot be split; ranks wait for the slowest
    assert (bound_s[1:4] > 1.001 * slower * compute_s[1:4]).all()
