"""The curves of a plan, and parameter servers beside it: laws that hold whatever the costs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import fake_strategies
import nouns
import pytest

from asa.cli import entry, places
from asa.cost.memory.peak import needed, usable
from asa.errors import InfeasibleError
from asa.ir import codec
from asa.ir.cluster import Device
from asa.ir.units import GIB
from asa.planner import Request, plan
from asa.planner.pipeline.whole import table
from asa.planner.questions import frontier
from asa.planner.space import consistency
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.report.text import frontier as report
from asa.report.text import tables

FULL = fake_strategies.FULL
MIB = nouns.MIB
SERVED = ("ps_sync", "ps_bounded", "ps_async")


def spread(share: float):
    """The tiny profile, its whole step spread over ``share`` of its median on both sides."""
    profile = nouns.profile()
    whole = profile.whole[0]
    w = replace(whole.whole, p10=whole.whole.median * (1 - share), p90=whole.whole.median * (1 + share))
    return replace(profile, whole=(replace(whole, whole=w),))


def rows(gpus: int, *, memory: int | None = None, share: float = 0.1, links: float = 1.0, update: float = 1.0):
    cluster = nouns.cluster(gpus)
    level = cluster.levels[0]
    slower = tuple(replace(t, points=tuple((size, links * s) for size, s in t.points)) for t in level.tables)
    cluster = replace(cluster, levels=(replace(level, tables=slower),))
    request = Request(gpus=gpus, global_batch=8, memory_bytes=memory)
    profile = spread(share)
    updates = tuple(
        replace(
            u, step=replace(u.step, median=u.step.median * update, p10=u.step.p10 * update, p90=u.step.p90 * update)
        )
        for u in profile.updates
    )
    profile = replace(profile, updates=updates)
    return {r.name: r for r in table(Prices(Space(profile, cluster, FULL, request)))}


def test_parameter_servers_are_in_the_table_and_never_chosen():
    found = plan(nouns.profile(), nouns.cluster(4), FULL, Request(gpus=4, global_batch=8))[0]
    by = {b.name: b for b in found.baselines}
    for name in SERVED:
        assert by[name].step_time_s is not None
        assert by[name].memory_bytes_max is not None
        assert not by[name].fits
        assert by[name].why_not.startswith("not chosen: it runs where it is asked for by name")
        assert ("convergence" in by[name].why_not) == (name != "ps_sync")
    assert found.strategy not in SERVED


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_whoever_waits_less_takes_less(gpus):
    """Where links and updates are free: one server has to be sent to by all, and updates once a push."""
    found = rows(gpus, links=1e-6, update=1e-6)
    times = [found[n].seconds for n in SERVED]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]
    memory = {found[n].price.peak.total for n in SERVED}
    assert len(memory) == 1, "the same is held by all"


def test_without_spread_there_is_nothing_to_wait_for():
    found = rows(4, share=0.0, links=1e-6, update=1e-6)
    assert found["ps_sync"].seconds == pytest.approx(found["ps_async"].seconds, rel=1e-3)
    assert found["ps_sync"].seconds == pytest.approx(found["ddp"].seconds, rel=1e-3)


def test_one_server_sends_to_every_worker_and_receives_from_every_worker():
    """Its link has all weights for each of the three others at the same time, and then the gradients of all three."""
    found = rows(4, share=0.0, update=1e-6)
    served, size = found["ps_sync"].price, 69 * MIB
    message = 1e-1 * size / (64 * MIB)
    plain = found["ddp"].price
    compute = sum(c.compute_s + c.update_s for c in plain.components) + sum(b.blocking_s for b in plain.boundaries)
    assert served.cost.total_s == pytest.approx(compute + 2 * 3 * message, rel=1e-3)
    assert found["ps_sync"].seconds > found["ddp"].seconds
    c = served.cost
    assert c.compute_s + c.exposed_s + c.bubble_s == pytest.approx(c.total_s)


def test_slower_links_never_make_a_server_faster():
    times = [[rows(4, links=k)[n].seconds for k in (0.5, 1, 4)] for n in SERVED]
    assert all(t == sorted(t) for t in times)


def test_one_device_has_no_servers():
    assert not set(SERVED) & set(rows(1))
    assert set(consistency.TABLED) == set(SERVED)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("device", [nouns.cluster().device, Device(name="G", type="cuda", memory_bytes=16 * GIB)])
def test_memory_needed_is_the_inverse_of_memory_usable(device, ranks):
    total = needed(device, 3.5 * GIB, ranks)
    assert usable(device, total, ranks) == pytest.approx(3.5 * GIB, rel=1e-9)
    assert usable(device, total, ranks) >= 3.5 * GIB


@cache
def curve():
    request = Request(gpus=4, global_batch=8)
    return frontier.against_memory(nouns.profile(), nouns.cluster(4), FULL, request)


def test_time_rises_as_memory_falls():
    points = curve()
    assert 2 <= len(points) <= frontier.POINTS
    limits, times = [p.limit_bytes for p in points], [p.step_time_s for p in points]
    assert limits == sorted(limits, reverse=True)
    assert times == sorted(times)
    assert len(set(times)) == len(times), "points that change nothing are merged"
    assert all(p.changed for p in points[1:])
    assert points[0].changed == ""


def test_every_point_is_the_plan_of_its_limit_and_below_the_last_nothing_fits():
    points = curve()
    for p in points:
        asked = Request(gpus=4, global_batch=8, memory_bytes=p.limit_bytes, prefer_simple=False)
        found = plan(nouns.profile(), nouns.cluster(4), FULL, asked)[0]
        assert found.prediction.step_time_s == pytest.approx(p.step_time_s)
        assert max(found.prediction.memory_bytes_per_rank) <= p.limit_bytes
    below = Request(gpus=4, global_batch=8, memory_bytes=int(0.5 * points[-1].limit_bytes))
    with pytest.raises(InfeasibleError):
        plan(nouns.profile(), nouns.cluster(4), FULL, below)


def test_the_curves_are_not_above_the_answer_that_a_longer_search_found():
    request, profile, cluster = Request(gpus=2, global_batch=8), nouns.profile(), nouns.cluster(2)
    found = plan(profile, cluster, FULL, request)[0]
    better = replace(found, prediction=replace(found.prediction, step_time_s=0.9 * found.prediction.step_time_s))
    points = frontier.against_memory(profile, cluster, FULL, request, points=2, answer=better)
    assert points[0].step_time_s == better.prediction.step_time_s
    cost = frontier.against_cost(profile, cluster, FULL, request, price=1.0, answer=better)
    assert cost[-1].step_time_s == better.prediction.step_time_s


def test_points_beyond_the_memory_there_is_say_so():
    have = curve()[0].limit_bytes - 1
    request = Request(gpus=4, global_batch=8, memory_bytes=have)
    points = frontier.against_memory(nouns.profile(), nouns.cluster(4), FULL, request)
    assert [p.fits for p in points] == [False] + [True] * (len(points) - 1)
    assert "more than there is" in tables.plain([report.memory(points)], width=200)


def test_counts_of_devices():
    assert frontier.counts(1) == (1,)
    assert frontier.counts(6) == (1, 2, 3, 4, 5, 6)
    assert frontier.counts(100) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100)


def test_cost_counts_the_devices_in_use():
    request = Request(gpus=4, global_batch=8)
    points = frontier.against_cost(nouns.profile(), nouns.cluster(4), FULL, request, price=3.0, epoch_samples=801)
    assert points[0].gpus == points[0].num_ranks == 1
    assert points[-1].up_to == 4
    for p in points:
        assert p.step_time_s is not None
        assert p.epoch_s == pytest.approx(101 * p.step_time_s), "the last batch of an epoch is a step too"
        assert p.epoch_cost == pytest.approx(p.num_ranks * 3.0 * p.epoch_s / 3600)
    assert points[0].on_frontier, "nothing is cheaper than one device that is never faster than linear"
    best = min(points, key=lambda p: p.epoch_s)
    assert best.on_frontier
    for p in points:
        beaten = any(q.epoch_s <= p.epoch_s and q.epoch_cost <= p.epoch_cost and q != p for q in points)
        assert p.on_frontier == (not beaten)


def test_more_devices_inherit_what_fewer_do(monkeypatch):
    own = {1: 4.0, 2: 3.0, 3: 3.5, 4: 3.0}

    def slow_search(profile, cluster, strategies, request, **known):
        found = plan(profile, cluster, strategies, replace(request, gpus=1), **known)[0]
        step = own[request.gpus]
        certificate = replace(found.certificate, lower_bound_s=2.7, gap=1 - 2.7 / step)
        prediction = replace(found.prediction, step_time_s=step, step_time_low_s=step, step_time_high_s=step)
        return [replace(found, prediction=prediction, certificate=certificate)]

    monkeypatch.setattr(frontier, "plan", slow_search)
    points = frontier.against_cost(nouns.profile(), nouns.cluster(4), FULL, Request(gpus=4, global_batch=8), price=1.0)
    assert [(p.gpus, p.up_to, p.step_time_s) for p in points] == [(1, 1, 4.0), (2, 4, 3.0)]
    assert points[1].gap == pytest.approx(0.1)


def test_too_few_devices_are_points_that_say_why():
    points = curve()
    request = Request(gpus=4, global_batch=8, memory_bytes=points[-1].limit_bytes)
    found = frontier.against_cost(nouns.profile(), nouns.cluster(4), FULL, request, price=1.0)
    alone = found[0]
    assert alone.epoch_s is None
    assert not alone.on_frontier
    assert "no plan fits" in alone.why_not
    assert "no plan fits" in tables.plain([report.cost(found)], width=200)


def test_the_command_prints_them_only_when_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "source" / "profiles")
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")

    def document(*argv: str):
        assert entry.run(["plan", "--json", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    assert "frontier" not in document()
    both = document("--frontier", "--price", "2.5", "--epoch-samples", "1000")["frontier"]
    assert {"limit_bytes", "step_time_s", "gap", "changed"} <= set(both["memory"][0])
    assert {"gpus", "epoch_s", "epoch_cost", "on_frontier"} <= set(both["cost"][0])
    assert document("--frontier")["frontier"]["cost"] == []
    assert entry.run(["plan", "--frontier", "--price", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "Time against memory" in said
    assert "Time against cost" in said
    assert "worth it: no other is as fast" in said
    assert entry.run(["plan", "--price", "2.5", "--epochs", "90"]) == 0
    said = capsys.readouterr().out
    assert "90 epochs" in said
    first = next(p for p in both["cost"] if p["epoch_cost"] is not None)
    points = document("--price", "2.5", "--epochs", "90")
    assert points["epochs"] == 90
    assert f"{90 * points['frontier']['cost'][0]['epoch_cost']:.4g}" in said
    assert first["gpus"] == points["frontier"]["cost"][0]["gpus"]


@pytest.mark.parametrize(
    ("name", "sizes", "paid"),
    [("local_sgd:groups=2", [1, 2, 4], {2: 2, 4: 4}), ("ps_async:placement=own", [1, 2, 3, 4], {2: 2, 3: 3, 4: 4})],
)
def test_groups_and_servers_are_paid_for_and_too_few_devices_are_a_point(name, sizes, paid):
    request = Request(gpus=4, global_batch=8, strategies=(name,))
    points = frontier.against_cost(nouns.profile(), nouns.cluster(4), FULL, request, price=3.0, epoch_samples=8)
    assert [p.gpus for p in points if p.gpus in sizes] == [p.gpus for p in points]
    assert points[0].why_not
    assert points[-1].up_to == 4
    for p in points[1:]:
        assert p.num_ranks == paid[p.gpus]
        assert p.epoch_cost == pytest.approx(paid[p.gpus] * 3.0 * p.step_time_s / 3600)
    answer = plan(nouns.profile(), nouns.cluster(4), FULL, request)[0]
    assert answer.num_ranks < answer.num_processes == 4
