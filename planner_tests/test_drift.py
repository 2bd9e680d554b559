"""How the machine changed while it was measured: what is read, what is corrected, what intervals make of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import exp, log
from random import Random
from statistics import pstdev

import fake_strategies
import nouns
import pytest
import test_profiler_components as components

from asa.cost.constants import constant
from asa.cost.planned import price_plan
from asa.cost.work.spread import Z90, contention, drift, expected_maximum, slowest_rank
from asa.errors import InvalidInputError
from asa.ir.cluster import Cluster
from asa.ir.codec import dumps, loads
from asa.ir.drift import Drift
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.planner.answer.prediction import predict
from asa.profiler.drift import Reference
from asa.report.text.cluster import drifted
from asa.report.text.cluster import render as render_cluster
from asa.report.text.profile import render as render_profile

STEADY = Drift(readings=((0.0, 1.0), (1.0, 1.0)), noise=0.01)


def wandering(deviation: float, seconds: int = 60) -> Drift:
    rng = Random(1)
    return Drift(readings=tuple((float(t), exp(rng.gauss(0, deviation))) for t in range(seconds)), noise=0.0)


class Machine:
    """A clock that ticks a second a look, and work that takes ``speed(now)`` seconds, give or take ``noise``."""

    def __init__(self, speed, noise: float = 0.0) -> None:
        self.ticks, self.speed, self.noise, self.rng = count(), speed, noise, Random(0)
        self.time = 0.0

    def now(self) -> float:
        self.time = float(next(self.ticks))
        return self.time

    def work(self) -> float:
        return self.speed(self.time) * exp(self.rng.gauss(0, self.noise))


def test_what_is_measured_while_the_machine_is_slow_is_stated_at_its_usual_speed():
    machine = Machine(lambda at: 2.0 if 20 < at < 40 else 1.0)
    reference, factors = Reference(machine.work, now=machine.now), []
    while machine.time < 80:
        reference.read()
        span = (reference.now(), reference.now())
        factors.append((span, machine.speed(span[0])))
    reference.read()
    inside = [(s, v) for s, v in factors if not 16 < s[0] < 24 and not 36 < s[0] < 44]
    assert {v for _, v in inside} == {1.0, 2.0}
    stated = [speed * reference.factor(*span) for span, speed in inside]
    assert stated == pytest.approx([stated[0]] * len(stated))
    assert 1.0 < stated[0] < 2.0


def test_noise_is_not_taken_for_drift():
    machine = Machine(lambda _: 1.0, noise=0.05)
    reference = Reference(machine.work, now=machine.now)
    for _ in range(40):
        reference.read()
    assert reference.drift is not None
    assert reference.drift.noise == pytest.approx(0.036, rel=0.3)
    assert reference.drift.deviation < 0.02
    assert abs(log(reference.factor(30, 31))) < 0.02


def test_a_reading_that_is_not_due_is_not_taken():
    machine = Machine(lambda _: 1.0)
    reference = Reference(machine.work, every_s=1000.0, now=machine.now)
    for _ in range(5):
        reference.read(due=True)
    assert reference.drift is not None
    assert len(reference.drift.readings) == 1
    assert reference.factor(0, 1) == 1.0


def test_nothing_read_is_no_drift():
    reference = Reference(lambda: 1.0)
    assert reference.drift is None
    assert reference.factor(0, 1) == 1.0


def test_the_deviation_is_that_of_the_readings():
    assert wandering(0.1, 2000).deviation == pytest.approx(0.1, rel=0.1)
    assert STEADY.deviation == STEADY.ahead == 0.0


@pytest.mark.parametrize("readings", [(), ((1.0, 1.0), (0.0, 1.0)), ((0.0, 0.0),), ((-1.0, 1.0),)])
def test_impossible_readings_are_refused(readings):
    with pytest.raises(InvalidInputError):
        Drift(readings=readings, noise=0.0)


@pytest.mark.parametrize("kind", [Profile, Cluster])
def test_documents_hold_it_and_those_from_before_are_what_they_were(kind):
    old = nouns.profile() if kind is Profile else nouns.cluster(2)
    assert "drift" not in dumps(old)
    new = replace(old, drift=STEADY)
    assert loads(kind, dumps(new), source="test") == new


def test_the_floor_the_default_and_estimates():
    measured = replace(nouns.profile(), provenance=replace(nouns.profile().provenance, origin="measured"))
    assert drift(measured) == constant("drift_assumed")
    assert drift(replace(measured, drift=STEADY)) == constant(f"drift_floor_{measured.device.type}")
    assert drift(replace(measured, drift=wandering(0.3))) == pytest.approx(0.3 * constant("drift_growth"), rel=0.2)
    assert drift(replace(measured, provenance=replace(measured.provenance, origin="estimated"))) == 0
    assert drift(nouns.cluster(2)) == 0
    virtual = replace(measured, drift=STEADY, device=replace(measured.device, virtual=True))
    assert drift(virtual) == constant(f"drift_floor_{measured.device.type}")  # what it showed itself, decision 0111
    assert loads(Profile, dumps(virtual), source="test").device.virtual


def test_it_widens_every_interval_and_says_nothing_of_which_plan_is_best():
    cluster, request = nouns.cluster(2), Request(gpus=2, global_batch=8)
    calm = replace(nouns.profile(), drift=STEADY)
    wild, moved = replace(calm, drift=wandering(0.3)), replace(cluster, drift=wandering(0.3))
    one, other = (plan(calm, c, fake_strategies.FULL, request)[0] for c in (cluster, moved))
    assert one.confidence == other.confidence
    assert one.prediction.step_time_s == other.prediction.step_time_s
    price, widths = price_plan(one, calm, cluster, fake_strategies.FULL), [len(s.ranks) for s in one.stages]
    known, unknown = (predict(price, p, c, widths=widths, global_batch=8) for p, c in ((calm, cluster), (wild, moved)))
    assert known.step_time_s == unknown.step_time_s
    assert unknown.step_time_high_s > 1.2 * known.step_time_high_s
    assert log(unknown.step_time_high_s / unknown.step_time_s) / Z90 >= 0.99 * min(drift(wild), drift(moved))
    seen = predict(price, calm, moved, widths=widths, global_batch=8)  # by the links alone
    assert log(seen.step_time_high_s / seen.step_time_s) / Z90 >= 0.99 * drift(moved)


def test_ranks_in_step_wait_for_cores_that_drift():
    steady, wild = (
        slowest_rank(replace(nouns.profile(), drift=d), nouns.cluster(2), 2) for d in (STEADY, wandering(0.3))
    )
    assert steady == slowest_rank(nouns.profile(), nouns.cluster(2), 2)
    assert wild > 1.05 * steady
    assert slowest_rank(replace(nouns.profile(), drift=wandering(0.3)), nouns.cluster(2), 1) == 1
    virtual = replace(nouns.profile(), drift=STEADY, device=replace(nouns.profile().device, virtual=True))
    factor = 1 + constant("drift_floor_virtual") * expected_maximum(2)
    assert slowest_rank(virtual, nouns.cluster(2), 2) == pytest.approx(contention(nouns.cluster(2), 2) * factor)


def test_a_survey_on_a_machine_that_was_slow_for_a_while_is_as_if_it_had_not_been(monkeypatch: pytest.MonkeyPatch):
    """Laps and reference take what the fake machine's speed says."""
    machine, clock = Machine(lambda at: 3.0 if 14 < at < 26 else 1.0), components.HostClock()
    monkeypatch.setattr(clock, "seconds", lambda marks: [machine.work()] * (len(marks) - 1))
    surveyor = components.Surveyor(
        components._subject(), clock, global_batch=8, time_s=5.0, free_bytes=1 << 40, progress=lambda *_: None
    )
    monkeypatch.setattr(surveyor, "_reference", lambda _: Reference(machine.work, now=machine.now))
    raw = surveyor.survey()
    steady = surveyor.steadied()

    def spread(sweep) -> float:
        return pstdev(log(t.forward.median) for t in sweep.timings)

    assert machine.time > 30
    assert spread(raw) > 0.3
    assert spread(steady) < 0.75 * spread(raw)  # what was measured while it changed is in between
    assert [t.component for t in steady.timings] == [t.component for t in raw.timings]
    assert len(steady.whole) == len(raw.whole) > 0


def test_the_tables_of_a_profile_and_of_a_cluster_say_it():
    for made, show in ((nouns.profile(), render_profile), (nouns.cluster(2), render_cluster)):
        before, after = len(show(made)), len(show(replace(made, drift=wandering(0.1))))
        assert after == before + 1
    assert "of 60 readings" in drifted(wandering(0.1))
