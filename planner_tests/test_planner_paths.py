"""What counts of a way to run a stage are sums along the paths through it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import joint_oracle
import numpy as np
import pytest
from random_pipelines import RandomPipelines
from tables import some

from asa.planner.pipeline.stages import Completions, Explorer
from asa.planner.pipeline.thinning import BWD, FWD, SUM, C, P, Room, Thinning, V
from asa.planner.space.space import divisors
from asa.planner.stage.lattice import Numbers
from asa.planner.stage.problem import Chain


def drawn(seed: int, m: int = 1) -> Chain:
    """Four components, m microbatches. In half of the draws all ways of one compute equally long, so that what is
    hidden behind backward decides; in a third, what parts wait for each other lengthens it."""
    pipelines = RandomPipelines(
        seed, components=4, gpus=4, most=m, speed=(0.05, 0.02, 0.01)[seed % 3],
        memory=(50, 50, 2.5, 1.5)[seed // 3 % 4],
        strategies=2, checkpoint=seed % 2 == 1, sp=(1.25, 2.0)[seed // 4 % 2],
    )  # fmt: skip
    chain, rng = pipelines.chain(2, m), random.Random(seed)
    assert chain is not None
    rows = []
    for row in chain.configs:
        if seed // 2 % 2:
            row = tuple(replace(c, forward=row[0].forward, backward=row[0].backward) for c in row)
        if seed % 3 == 0:
            row = tuple(replace(c, bucket=c.once * rng.random()) for c in row)
        rows.append(row)
    return replace(chain, configs=tuple(rows))


@cache
def ways_through(seed: int, m: int, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """All ways through components a to b - 1, by brute force: times, and the degrees at both ends."""
    ways, degrees = joint_oracle.stage(drawn(seed, m), a, b, 1), divisors(2)
    ends = [[degrees.index(entry.data), degrees.index(leaving.data)] for _, entry, leaving, _ in ways]
    return np.array([times for times, *_ in ways]).reshape(-1, 4), np.array(ends, int).reshape(-1, 2)


def kept(most: int, *, m: int = 1, within: float = 1e3) -> list[tuple[int, int]]:
    """Of first, middle and last stages, how many points there are, and how many ways they stand for: of every way that
    takes no longer than ``within`` times the fastest one a point that is slower along none of the paths that lead
    through such a stage."""
    found = []
    for seed in range(48):
        chain = drawn(seed, m)
        for a, b in ((0, 3), (1, 3), (1, 4)):
            times, ends = ways_through(seed, m, a, b)
            if not len(times):
                continue
            whole = within * times.sum(axis=1).min()
            points = Explorer(Numbers(chain), 1).explore(a, {b: Room(1e3, 1e4, whole)}, most).get(b)
            assert points is not None, seed
            f, back, longer, once = (x[:, None] for x in points.least)
            near = times.sum(axis=1) <= whole
            forward, backward, extra, after = times[near].T
            entry, leaving = ends[near].T
            good = (points.entry[:, None] == entry) & (points.exit[:, None] == leaving)
            good &= f + back + once <= forward + backward + extra + after + 1e-9
            if b < 4 or m > 1:
                good &= f <= forward + 1e-9
            if m > 1:
                good &= back <= backward + 1e-9
            if a > 0:
                good &= f + back + longer <= forward + backward + extra + 1e-9
            assert good.any(axis=0).all(), (seed, a, b)
            found.append((len(points), int(near.sum())))
    return found


@pytest.mark.parametrize(("m", "share"), some([(1, 0.1), (2, 0.3), (4, 0.3)], [(1, 0.1), (2, 0.3)]))
def test_a_way_that_is_left_out_is_slower_along_some_path(m, share):
    for most in (10_000, 12, 2):
        found = kept(most, m=m)
        assert len(found) > 80
        assert sum(points for points, _ in found) < share * sum(ways for _, ways in found)


def test_ways_that_take_too_long_along_their_shortest_path_are_left_out():
    assert sum(ways for _, ways in kept(10_000, within=1.2)) < 0.5 * sum(ways for _, ways in kept(10_000))


@pytest.mark.parametrize("what", ["leading", "last", "rounded"])
def test_a_path_that_is_not_looked_at_would_be_noticed(monkeypatch, what):
    monkeypatch.setattr(Thinning, what, property(lambda _: True, lambda *_: None), raising=False)
    with pytest.raises(AssertionError):
        kept(10_000)


def test_labels_that_are_rounded_are_known_to_be_no_longer_than_they_say():
    """What is hidden looks more than it is where clocks are rounded down: then it lengthens nothing."""
    thin = Thinning(Numbers(drawn(3)), tight=False)
    labels = np.zeros((2, 12))
    labels[0, [FWD, BWD, V, C, P, SUM]] = 0.4, 0.7, 5.0, 5.0, 5.0, 5.0
    labels[1, [FWD, BWD, V, C, P, SUM]] = 0.4, 0.6, 5.2, 5.2, 5.2, 15.0
    assert thin.best(labels, np.zeros(2), arriving=False).tolist() == [0]
    thin.rounded = True
    assert sorted(thin.best(labels, np.zeros(2), arriving=False).tolist()) == [0, 1]


def test_a_step_of_one_microbatch_has_the_less_of_two_limits():
    x = Numbers(RandomPipelines(1, components=4, gpus=4, most=1, speed=0.05, memory=2.5).chain(2, 1))
    bounds = Completions(x, 1, tight=True)
    once = bounds.rows[:, 2] > 0
    room, less, more = (bounds.limits(Room(8.0, *both)) for both in ((9.0, 9.0), (20.0, 9.0), (9.0, 20.0)))
    assert (room == less).all()
    assert (room == more).all()
    assert (bounds.limits(Room(8.0, 20.0, 20.0))[once] > room[once]).all()
