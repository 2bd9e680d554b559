"""``asa plan --consistency any --target``: disciplines side by side, in seconds and to a target."""

from __future__ import annotations

from dataclasses import replace

import fake_strategies
import nouns
import pytest

from asa.cost.planned import price_plan
from asa.errors import InfeasibleError, UsageError
from asa.ir.cluster import Cluster, RankDevice
from asa.ir.consistency import NAMES, parse
from asa.ir.profile import Profile
from asa.ir.staleness import PLAIN, Curve, Setting, Staleness, Target, TrainingRun
from asa.planner import Request, plan
from asa.planner.answer.consistency import EVEN, UNEVEN, Consistency, compare
from asa.planner.space.baselines import check_request
from asa.report.figures import staleness as staleness_figures
from asa.report.text import consistency as report
from asa.report.text.tables import plain as text
from asa.schedules import schedules

FULL = fake_strategies.FULL
SERVED = parse("ps_async").momentum_at(0.9, 4)
"""Momentum at the servers of 4 workers."""
NINE = Target(what="accuracy", value=0.9)


def curves(steps: dict[Setting, tuple[int, ...]], **changes) -> Staleness:
    """Runs that reach an accuracy of 0.9 at those steps, of 100; 0 for one that never does."""

    def run(seed: int, at: int) -> TrainingRun:
        reached = tuple(0.95 if at and s >= at else 0.1 for s in range(1, 101))
        return TrainingRun(seed=seed, losses=tuple(1 - a for a in reached), accuracies=reached)

    made = Staleness(
        model_spec="tiny", model_fingerprint=nouns.profile().model_fingerprint, input_shape=(3, 32, 32),
        num_classes=10, data="digits", optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.0,
        global_batch=16, workers=4, steps=100, every=1,
        curves=tuple(
            Curve(setting=s, runs=tuple(run(i, at) for i, at in enumerate(reached))) for s, reached in steps.items()
        ),
        created="2025-01-02T03:04:05+00:00", asa_version="0", torch_version="2", device="Test CPU",
    )  # fmt: skip
    return replace(made, **changes)


KNOWN = curves(
    {
        PLAIN: (20, 24),
        Setting(workers=4, delay=0, momentum=SERVED): (20, 20),
        Setting(workers=4, delay=4, momentum=SERVED): (40, 48),
        Setting(workers=4, delay=16, momentum=SERVED): (0, 0),
        Setting(workers=4, delay=4, weighted=True, momentum=SERVED): (30, 30),
        Setting(workers=4, period=4): (22, 22),
        Setting(workers=4, period=16): (0, 30),
    }
)


def box(speeds: tuple[float, ...] | None = None, links: float = 1.0) -> Cluster:
    made = nouns.cluster(4)
    level = made.levels[0]
    tables = tuple(replace(t, points=tuple((n, links * s) for n, s in t.points)) for t in level.tables)
    made = replace(made, levels=(replace(level, tables=tables),))
    if speeds is None:
        return made
    return replace(made, devices=tuple(RankDevice(name=f"d{i}", speed=s) for i, s in enumerate(speeds)))


def table(
    cluster: Cluster, *, loosely: bool = True, target: Target | None = None, known=(), asked=(), gpus: int = 4,
    profile: Profile | None = None,
) -> Consistency:  # fmt: skip
    request, profile = Request(gpus=gpus, global_batch=16), profile or nouns.profile()
    answer = plan(profile, cluster, FULL, request)[0]
    return compare(
        profile, cluster, FULL, request, answer, loosely=loosely, target=target, curves=known,
        asked=[parse(a) for a in asked],
    )  # fmt: skip


def updating(factor: float) -> Profile:
    """A profile whose updates, and so copies of its weights, take ``factor`` times as long."""
    made = nouns.profile()
    return replace(made, updates=tuple(replace(u, step=nouns.stat(factor * u.step.median)) for u in made.updates))


def rows(found: Consistency):
    return {r.name: r for r in found.rows}


def test_the_floor_stands_in_every_table_and_disciplines_only_where_asked():
    for loosely in (False, True):
        names = list(rows(table(box(), loosely=loosely)))
        assert names[0].startswith("this plan")
        assert names[1:3] == [EVEN, UNEVEN]
        assert names[3:] == (list(NAMES) if loosely else [])


def test_one_of_four_devices_at_half_speed():
    """Uneven batches win what asynchronous training wins, without its staleness."""
    asked = ("ps_bounded:window=100:max_age=none",)
    found = rows(table(box((1.0, 1.0, 1.0, 0.5), links=1e-6), asked=asked, profile=updating(0.3)))
    even, uneven = found[EVEN].step_time_s, found[UNEVEN].step_time_s
    assert 1.4 < even / uneven < 1.85
    assert found[UNEVEN].max_age == 0
    for name in ("ps_async", "hogwild"):
        assert 1.4 < even / found[name].step_time_s < 1.85
    assert found["ps_bounded"].step_time_s >= 0.99 * found["ps_async"].step_time_s
    assert even == pytest.approx(found["ps_sync"].step_time_s, rel=0.15)


def test_copies_of_heavy_weights_make_servers_slower():
    """Workers copy gradients and weights, and a server copies them for each worker, which DDP does not."""
    light, heavy = (rows(table(box(links=1e-6), profile=updating(f))) for f in (0.01, 1.0))
    updates_s = sum(u.step.median for u in nouns.profile().updates if u.tensor_degree == 1)
    for name in ("ps_sync", "ps_async"):
        assert heavy[name].step_time_s - light[name].step_time_s > 2 * updates_s
    assert heavy[EVEN].step_time_s - light[EVEN].step_time_s == pytest.approx(updates_s, rel=0.3)


def test_without_a_target_nothing_is_said_of_steps():
    for r in rows(table(box())).values():
        assert r.steps is None
        assert r.time_to_target is None
        assert r.unknown == ""


def test_time_to_a_target_is_steps_times_seconds():
    found = table(box(links=1e-6), target=NINE, known=(KNOWN,))
    by = rows(found)
    assert (by[EVEN].steps.median, by[EVEN].steps.low, by[EVEN].steps.high) == (22, 20, 24)
    time = by[EVEN].time_to_target
    assert time.median_s == pytest.approx(22 * by[EVEN].step_time_s)
    assert time.low_s == pytest.approx(20 * by[EVEN].step_time_low_s)
    assert time.high_s == pytest.approx(24 * by[EVEN].step_time_high_s)
    assert by["ps_sync"].steps == by[EVEN].steps
    late = by["ps_async"]
    assert late.steps.median == pytest.approx(20 + late.mean_age * 24)
    other = rows(table(box(), target=NINE, known=(KNOWN,), asked=("ps_async:momentum=0.5",)))["ps_async:momentum=0.5"]
    assert other.time_to_target is None
    assert "momentum 0.5" in other.unknown
    assert by["local_sgd"].steps.median == 22
    assert found.first
    means = {r.name: r.time_to_target.median_s for r in found.rows if r.time_to_target and r.time_to_target.median_s}
    assert found.first == min(means, key=means.get)


def test_what_was_not_measured_stays_unknown_and_says_why():
    others = ("fedavg:spread=1.0", "local_sgd:growth=0.1")
    by = rows(table(box(), target=NINE, known=(KNOWN,), asked=("local_sgd:period=50", *others)))
    assert by["diloco"].time_to_target is None
    assert "no curve of a period of 50" in by["diloco"].unknown
    assert "no curve of a period of 50" in by["local_sgd:period=50"].unknown
    for name in others:
        assert by[name].time_to_target is None
        assert "not measured" in by[name].unknown
    assert "--staleness --workers 4 --strategies downpour" in by["downpour"].unknown
    other = rows(table(box(), target=NINE, known=(replace(KNOWN, global_batch=64),)))
    assert all(r.time_to_target is None for r in other.values())
    assert "global batch of 64, not 16" in other[EVEN].unknown
    assert "--staleness" in rows(table(box(), target=NINE))[EVEN].unknown
    few = rows(table(box(), target=NINE, known=(replace(KNOWN, workers=2),)))
    assert "--workers 4" in few["ps_async"].unknown
    both = rows(table(box(), target=NINE, known=(replace(KNOWN, workers=2), KNOWN)))
    assert both["ps_async"].time_to_target is not None
    assert few[EVEN].time_to_target is not None


def test_a_target_that_no_run_reached_is_not_promised():
    found = table(box(), target=Target(what="accuracy", value=0.99), known=(KNOWN,))
    assert found.first == ""
    assert {r.unknown for r in found.rows if r.steps is not None} == {"no run reached it"}


def test_surely_first_only_where_seeds_do_not_overlap():
    for seeds, sure in (((5, 6, 6), True), ((5, 6), False), ((5,), False)):  # too few seeds have no range to speak of
        quick = curves({**_same(KNOWN), PLAIN: (90, 95), Setting(workers=4, period=4): seeds})
        found = table(box(), target=NINE, known=(quick,))
        assert (found.first, found.surely) == ("local_sgd", sure)
    doubtful = curves({**_same(KNOWN), PLAIN: (2, 95), Setting(workers=4, period=4): (5, 6)})
    found = table(box(), target=NINE, known=(doubtful,))
    assert (found.first, found.surely) == ("local_sgd", False)


def _same(known: Staleness) -> dict[Setting, tuple[int, ...]]:
    return {
        c.setting: tuple(next((i for i, a in enumerate(r.accuracies, 1) if a > 0.9), 0) for r in c.runs)
        for c in known.curves
    }


def test_what_devices_cannot_do_is_refused_in_its_row():
    gpu = replace(box().device, type="cuda", name="G", peak_fp32_flops=1e13, memory_bandwidth=1e12)
    found = rows(table(replace(box(), device=gpu)))
    assert found["hogwild"].step_time_s is None
    assert "CPU ranks" in found["hogwild"].why_not
    assert "5 servers" in rows(table(box(), asked=("ps_async:servers=5",)))["ps_async:servers=5"].why_not
    with pytest.raises(UsageError, match="no discipline of consistency can run"):
        table(nouns.cluster(1), gpus=1)


def test_a_plan_under_a_discipline_has_the_time_of_its_clock():
    """Figures of a discipline count: two servers are not one."""
    by = rows(table(box(), asked=("ps_async:servers=2", "ps_sync:servers=2", "local_sgd:period=16")))
    for name in ("ps_async", "ps_async:servers=2", "local_sgd:period=16"):
        request = Request(gpus=4, global_batch=16, strategies=(name,))
        made = plan(nouns.profile(), box(), FULL, request)[0]
        p = made.prediction
        assert str(made.consistency) == name
        assert p.step_time_s == pytest.approx(by[name].step_time_s, rel=1e-6)
        assert p.step_time_low_s < p.step_time_s < p.step_time_high_s
        assert p.compute_s + p.exposed_communication_s + p.bubble_s == pytest.approx(p.step_time_s)
    assert by["ps_sync:servers=2"].step_time_s < by["ps_sync"].step_time_s


def test_figures_show_every_known_time_and_every_seed():
    found = table(box(), target=NINE, known=(KNOWN,))
    times, late, rare = staleness_figures.charts(found, KNOWN)
    known = {r.name: r.time_to_target for r in found.rows if r.time_to_target and r.time_to_target.median_s}
    assert {row[0]: row[1:] for row in times.rows} == {n: (t.low_s, t.median_s, t.high_s) for n, t in known.items()}
    assert [row[2] for row in times.rows] == sorted(t.median_s for t in known.values())
    at = {row[:2]: row[2:] for row in (*late.rows, *rare.rows)}
    assert at[PLAIN.words, 22] == (0.1, pytest.approx(0.525), 0.95)
    assert {name for name, _ in at} == {c.setting.words for c in KNOWN.curves}
    for chart in (times, late, rare):
        drawn = chart.draw(chart.rows).axes[0]
        assert len(drawn.patches) + len(drawn.collections) == len({row[0] for row in chart.rows})
    assert staleness_figures.charts(table(box()), None) == ()


@pytest.mark.parametrize("name", ["ps_sync", "ps_async", "local_sgd", "local_sgd:period=1"])
def test_a_plan_under_a_discipline_stands_in_the_table_as_that_discipline(name):
    request = Request(gpus=4, global_batch=16, strategies=(name,))
    answer = plan(nouns.profile(), box(), FULL, request)[0]
    found = rows(compare(nouns.profile(), box(), FULL, request, answer, loosely=True, target=NINE, curves=(KNOWN,)))
    mine = found[f"this plan ({answer.strategy})"]
    other = found.get(name, found[EVEN])
    same = ("exact", "mean_age", "max_age", "steps", *(("waits_for", "changes", "waited") if name in found else ()))
    assert {a: getattr(mine, a) for a in same} == {a: getattr(other, a) for a in same}


def test_the_table_reads_as_a_table():
    said = text(report.render(table(box(), target=NINE, known=(KNOWN,))), width=160)
    assert "steps to accuracy=0.9" in said
    assert "unknown (" in said
    assert "ddp, uneven batches" in said


def test_what_no_discipline_runs_with_and_names_that_do_not_exist_are_refused_before_a_plan_is_made():
    request = Request(gpus=2, global_batch=16, strategies=("ps_async",), compression="fp16")
    with pytest.raises(UsageError, match="ps_async does not run with compression fp16"):
        plan(nouns.profile(), box(), FULL, request)
    match = r"no strategy 'ps_bound'; did you mean ps_bounded\?; one of asa, .*, ps_bounded"
    with pytest.raises(UsageError, match=match):
        plan(nouns.profile(), box(), FULL, replace(request, strategies=("ps_bound",)))
    with pytest.raises(UsageError, match="ps_async runs where it is asked for by name"):  # before anything is measured
        check_request(None, FULL, replace(request, strategies=("ps_async", "ddp"), compression="none"))


def test_groups_of_one_device_say_so_and_keep_their_own_advice():
    asked = Request(gpus=2, global_batch=16, strategies=("local_sgd:groups=2", "ddp"))
    with pytest.raises(UsageError, match=r"2 groups of 1 device of 2, ddp needs at least 2 .* --gpus 4, or leave ddp"):
        plan(nouns.profile(), box(), FULL, asked)
    alone = plan(nouns.profile(), box(), FULL, replace(asked, strategies=("local_sgd:groups=2",)))[0]
    advice = [n for n in alone.notes if "stay with" in n]
    assert len(advice) == 1
    assert advice[0].startswith("inside a group, stay with")


@pytest.mark.parametrize(
    ("name", "lasting", "exchanged"),
    [
        ("ps_sync", (1 + 4, -1, -1, -1), 3),  # server: weights, momentum, what four workers send; worker: no momentum
        ("ps_async:servers=2", (2, 2, -1, -1), 3),
        ("ps_sync:placement=own", (-1, -1, -1), 3),
        ("downpour", (1 + 1 + 4, 0, 0, 0), 3),
        ("hogwild", (0, 0, 0, 0), 1),
        ("local_sgd", (0, 0, 0, 0), 2),
        ("fedavg", (1, 1, 1, 1), 4),
        ("diloco", (2, 2, 2, 2), 4),
        ("diloco:quorum=2", (1 + 6, 1, 1, 1), 3),
    ],
)
def test_a_plan_counts_what_its_discipline_holds(name: str, lasting: tuple[float, ...], exchanged: float) -> None:
    """In copies of the weights, beyond one rank that trains alone; while ranks exchange there are also gradients."""
    profile, count = nouns.profile(), len(lasting)
    size = sum(c.parameter_bytes for c in profile.graph.components)
    found = plan(profile, box(), FULL, Request(gpus=4, global_batch=4 * count, strategies=(name,)))[0]
    alone = plan(profile, box(), FULL, Request(gpus=1, global_batch=4, strategies=("single",)))[0]
    plain = alone.prediction.memory_bytes_per_rank[0]
    for memory, held in zip(found.prediction.memory_bytes_per_rank, lasting, strict=True):
        passes, exchange = plain + held * size, (2 + held + exchanged) * size  # weights and momentum
        assert memory == pytest.approx(max(passes, exchange), rel=0.02), (name, held)
        assert memory >= max(passes, exchange) - 2


def test_two_batches_are_in_flight_in_a_pipeline_that_is_not_drained() -> None:
    """With 3 stages and 2 microbatches, the first stage holds 3 of them, and 2 if the pipeline is drained."""
    profile, cluster, strategies = nouns.profile(), box(), replace(FULL, schedules=schedules())
    request = Request(gpus=3, global_batch=12, strategies=("1f1b",), microbatches=2)
    drained = plan(profile, cluster, strategies, request)[0]
    late = replace(drained, consistency=parse("pipedream"))
    activations = [
        [s.peak.activations for s in price_plan(p, profile, cluster, strategies).stages] for p in (drained, late)
    ]
    ratios = [after / before for before, after in zip(*activations, strict=True)]
    assert ratios == pytest.approx([3 / 2, 1, 1])


def test_a_discipline_that_needs_more_than_there_is_is_refused_in_a_line() -> None:
    request = Request(gpus=2, global_batch=16, strategies=("ps_sync",))
    needed = max(plan(nouns.profile(), box(), FULL, request)[0].prediction.memory_bytes_per_rank)
    with pytest.raises(InfeasibleError, match=r"ps_sync needs .* [KMG]iB on a rank, and .* can be used; take a"):
        plan(nouns.profile(), box(), FULL, replace(request, memory_bytes=int(needed * 0.9)))


def test_a_server_on_a_device_of_its_own_is_compared_with_strategies_on_all_devices():
    plain = Request(gpus=4, global_batch=16, strategies=("ddp",))
    ddp = plan(nouns.profile(), box(), FULL, plain)[0]
    for name in ("ps_async:placement=own", "ps_async", "local_sgd:groups=2"):
        found = plan(nouns.profile(), box(), FULL, replace(plain, strategies=(name,)))[0]
        by = {b.name: b.step_time_s for b in found.baselines}
        assert by["ddp"] == ddp.prediction.step_time_s, name
        assert found.certificate.gap == pytest.approx(
            1 - found.certificate.lower_bound_s / found.prediction.step_time_s, abs=1e-9
        )
