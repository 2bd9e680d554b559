"""Laws of compute times: the measured comes back, nothing is scaled through the origin, nothing beats the floor."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import fake_strategies
import nouns
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost.pricing import times_of
from asa.cost.work.compute import deviation, standard_error
from asa.cost.work.spread import contention, expected_maximum, relative_deviation, slowest_rank
from asa.ir.cluster import Contention
from asa.ir.profile import Stat

PROFILE = nouns.profile()
TIMES = times_of(PROFILE, fake_strategies.PLAIN)
HEAD = PROFILE.graph.component("head")


def test_measured_times_come_back():
    for t in PROFILE.timings:
        found = TIMES.work(PROFILE.graph.component(t.component), t.microbatch, t.tensor_degree)
        assert (found.forward_s, found.backward_s) == (t.forward.median, t.backward.median)
        assert (found.saved_bytes, found.transient_bytes) == (t.saved_bytes, t.transient_bytes)


def test_between_and_beyond_measurements_time_is_affine_and_not_proportional():
    # The fake is 0.002 m + 0.0005 throughout.
    assert TIMES.work(HEAD, 6, 1).forward_s == pytest.approx(0.0125)
    assert TIMES.work(HEAD, 16, 1).forward_s == pytest.approx(0.0325)


def test_a_degree_between_measured_ones_follows_its_share_of_flops():
    one, two = TIMES.work(HEAD, 8, 1), TIMES.work(HEAD, 8, 2)
    four = TIMES.work(HEAD, 8, 4)
    assert PROFILE.dispatch_floor_s < four.forward_s < two.forward_s < one.forward_s
    assert four.saved_bytes == pytest.approx(two.saved_bytes / 2)


def test_below_its_smallest_microbatch_a_degree_falls_as_the_whole_component_does():
    """Weights that are read whatever the batch is do not go away at microbatches nobody measured."""
    slow = tuple(
        replace(t, forward=nouns.stat(0.04 + 1e-3 * t.microbatch)) if t.tensor_degree == 1 else t
        for t in PROFILE.timings
        if t.tensor_degree == 1 or t.microbatch >= 4
    )
    times = times_of(replace(PROFILE, timings=slow), fake_strategies.PLAIN)
    edge = times.work(HEAD, 4, 2).forward_s
    assert times.work(HEAD, 1, 2).forward_s == pytest.approx(edge * 0.041 / 0.044)
    assert times.work(HEAD, 4, 2) == TIMES.work(HEAD, 4, 2)
    assert times.work(HEAD, 8, 2) == TIMES.work(HEAD, 8, 2)


def test_memory_of_a_degree_seen_at_one_microbatch_falls_as_that_of_the_whole_component_does():
    """What weights take in backward does not shrink with the batch: of 64 samples alone that cannot be seen."""
    sized = {(1, 64): (6400, 1264), (1, 16): (1600, 1216), (2, 64): (4800, 600)}
    base = next(t for t in PROFILE.timings if t.component == HEAD.name)
    kept = tuple(
        replace(base, tensor_degree=t, microbatch=m, saved_bytes=saved, transient_bytes=passing)
        for (t, m), (saved, passing) in sized.items()
    )
    profile = replace(PROFILE, timings=(*(t for t in PROFILE.timings if t.component != HEAD.name), *kept))
    times = times_of(profile, fake_strategies.PLAIN)
    found = times.work(HEAD, 16, 2)
    assert found.saved_bytes == pytest.approx(1200)
    assert found.transient_bytes == pytest.approx(1216 / 2)  # 577 by the ratio alone
    assert times.work(HEAD, 64, 2).transient_bytes == 600


@given(st.integers(1, 4096), st.integers(1, 64))
def test_nothing_is_faster_than_the_dispatch_floor(samples, degree):
    found = TIMES.work(HEAD, samples, degree)
    assert min(found.forward_s, found.backward_s) >= PROFILE.dispatch_floor_s


@given(st.integers(1, 2048), st.integers(1, 2048))
def test_more_samples_never_take_less_time(a, b):
    few, many = sorted((a, b))
    assert TIMES.work(HEAD, few, 1).forward_s <= TIMES.work(HEAD, many, 1).forward_s * (1 + 1e-12)


def test_one_measurement_scales_only_what_lies_above_the_floor():
    kept = tuple(t for t in PROFILE.timings if t.microbatch == 8)
    times = times_of(replace(PROFILE, timings=kept, dispatch_floor_s=0.01), fake_strategies.PLAIN)
    assert times.work(HEAD, 4, 1).forward_s == pytest.approx(0.01 + (0.0165 - 0.01) / 2)


def test_optimizer_time_falls_back_by_bytes_then_passes_then_bandwidth():
    known = TIMES.update(HEAD, 1, "sgd", HEAD.parameter_bytes, 0.0)
    assert known == pytest.approx(1e-4 * 64)
    assert TIMES.update(HEAD, 4, "sgd", HEAD.parameter_bytes / 4, 0.0) == pytest.approx(known / 4)
    assert TIMES.update(HEAD, 1, "adamw", HEAD.parameter_bytes, 0.0) == pytest.approx(known * 7 / 5)
    blank = times_of(replace(PROFILE, updates=()), fake_strategies.PLAIN)
    assert blank.update(HEAD, 1, "sgd", 6e9, 1e10) == pytest.approx(5 * 6e9 / (0.6 * 1e10))
    assert TIMES.update(HEAD, 1, "sgd", 0, 0.0) == 0


def test_the_whole_step_corrects_the_sum_of_its_components():
    assert TIMES.whole_ratio(8) == pytest.approx(0.15 / 0.147)
    far = replace(PROFILE, whole=(replace(PROFILE.whole[0], components_s=0.05),))
    assert times_of(far, fake_strategies.PLAIN).whole_ratio(8) == pytest.approx(1.1)
    assert times_of(replace(PROFILE, whole=()), fake_strategies.PLAIN).whole_ratio(8) == 1
    ratios = {"components": 1, "graphs": 1, "whole": 0.15 / 0.05}  # what runs is priced: parts, or the whole
    for compiled, ratio in ratios.items():
        made = times_of(replace(far, compiled=compiled), fake_strategies.PLAIN)
        assert made.whole_ratio(8) == pytest.approx(ratio), compiled


def test_spread_of_a_normal_is_recovered():
    stat = Stat(median=1.0, p10=1 - 0.12816, p90=1 + 0.12816, n=25)
    assert deviation(stat) == pytest.approx(0.1, rel=1e-3)
    assert standard_error(stat) == pytest.approx(1.2533 * 0.1 / 5, rel=1e-3)


@pytest.mark.parametrize(("ranks", "known"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236), (64, 2.3436)])
def test_expected_maximum_of_normals(ranks, known):
    assert expected_maximum(ranks) == pytest.approx(known, rel=0.05)


def test_contention_is_affine_between_measured_counts():
    c = replace(nouns.cluster(8), contention=(Contention(ranks=2, slowdown=1.2), Contention(ranks=6, slowdown=2.0)))
    assert [contention(c, n) for n in (1, 2, 4, 6, 8)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.0])


def test_a_step_waits_for_the_slowest_of_more_ranks():
    c = replace(nouns.cluster(8), contention=(Contention(ranks=8, slowdown=1.0),))
    assert slowest_rank(PROFILE, c, 1) == 1
    assert slowest_rank(PROFILE, c, 2) < slowest_rank(PROFILE, c, 8)
    assert relative_deviation(PROFILE) > 0


FIELDS = ("forward_s", "backward_s", "saved_bytes", "transient_bytes", "unmade_bytes")


def line(xs: list[int], ys: list[float], x: float) -> float:
    at = min(max(sum(known < x for known in xs), 1), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return ys[-1] + max(0.0, slope) * (x - xs[-1]) if x > xs[-1] else ys[at - 1] + slope * (x - xs[at - 1])


class OneByOne:
    """The same laws once more, a number at a time, from nothing but the profile: an oracle for the arrays."""

    def __init__(self, profile, share):
        self.floor, self.share, self.known = profile.dispatch_floor_s, share, {}
        for t in profile.timings:
            figures = (t.forward.median, t.backward.median, t.saved_bytes, t.transient_bytes, t.unmade_bytes)
            self.known.setdefault((t.component, t.tensor_degree), {})[t.microbatch] = figures

    def at(self, name, degree, samples):
        points = sorted(self.known[name, degree].items())
        xs, found = [x for x, _ in points], []
        for k, ys in enumerate(zip(*(values for _, values in points), strict=True)):
            floor = 0.0 if k > 1 else self.floor if len(xs) > 1 else min(self.floor, ys[0])
            one = len(xs) == 1
            y = floor + (ys[0] - floor) * samples / xs[0] if one else max(floor, line(xs, ys, samples))
            found.append(min(y, max(ys)) if k == 4 else y)
        return found

    def measured(self, name, degree, samples):
        least, found = min(self.known[name, degree]), self.at(name, degree, samples)
        if degree == 1 or samples >= least or min(self.known[name, 1]) >= least:
            return found
        small, large = self.at(name, 1, samples), self.at(name, 1, least)
        falls = [e * (a / b if b else 1) for e, a, b in zip(self.at(name, degree, least), small, large, strict=True)]
        if len(self.known[name, degree]) == 1:
            found[2:] = falls[2], max(falls[3], small[3] / degree), falls[4]
        return [max(self.floor, falls[0]), max(self.floor, falls[1]), *found[2:]]

    def work(self, component, degree, samples):
        name, degrees = component.name, sorted(d for n, d in self.known if n == component.name)
        if degree in degrees:
            return self.measured(name, degree, samples)
        below = max(d for d in degrees if d < degree)
        above = next((d for d in degrees if d > degree), None)
        share, first = self.share(component, degree), self.share(component, below)
        high, last = [self.floor, self.floor, 0, 0, 0], 0.0
        if above is not None:
            high, last = self.measured(name, above, samples), self.share(component, above)
        mix = (first - share) / (first - last)
        floors = (self.floor, self.floor, 0, 0, 0)
        both = zip(self.measured(name, below, samples), high, floors, strict=True)
        return [max(floor, a + mix * (b - a)) for a, b, floor in both]


@pytest.mark.parametrize(
    ("kept", "split"), [((1, 2, 4, 8), (1, 2, 4, 8)), ((8,), (8,)), ((1, 2, 8), (4, 8)), ((1, 4, 8), (8,))]
)
@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (1, 2, 4)])
def test_all_components_at_once_take_what_each_of_them_does(kept, split, degrees):
    rng, timings = random.Random(7), []
    for t in PROFILE.timings:
        for degree in degrees[1:] if t.tensor_degree == 2 else (1,) if t.tensor_degree == 1 else ():
            if t.microbatch in (kept if degree == 1 else split):
                own = {
                    n: nouns.stat(rng.uniform(0.5, 1.5) * t.forward.median / degree) for n in ("forward", "backward")
                }
                sizes = {n: rng.randrange(1, 10**6) for n in ("saved_bytes", "transient_bytes")}
                unmade = rng.randrange(sizes["transient_bytes"])
                timings.append(replace(t, tensor_degree=degree, **own, **sizes, unmade_bytes=unmade))
    profile = replace(PROFILE, timings=tuple(timings), dispatch_floor_s=2e-3)
    times, components = times_of(profile, fake_strategies.PLAIN), profile.graph.components
    tensor = fake_strategies.PLAIN.tensor["tensor"]
    oracle = OneByOne(profile, lambda c, d: tensor.share(c, d).flops_per_sample / c.flops_per_sample if d > 1 else 1.0)
    for samples, degree in product((1, 3, 8, 100), (1, 2, 3, 4, 7)):
        both = times.both(samples, degree)
        for i, c in enumerate(components):
            if degree == 1 or c.split is not None:
                work = times.work(c, samples, degree)
                found = [getattr(work, name) for name in FIELDS]
                assert found == pytest.approx(oracle.work(c, degree, samples), rel=1e-12), (c.name, samples, degree)
                assert both[i] == work.forward_s + work.backward_s
