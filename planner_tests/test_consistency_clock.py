"""The clock of disciplines: laws that hold whatever the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asa.cost.consistency import Machine, Server, Worker, play
from asa.errors import UsageError
from asa.ir.consistency import LONGEST, NAMES, Discipline, parse

FREE = {"ps_async", "hogwild", "downpour"}
CLOCKED = tuple(n for n in NAMES if n != "pipedream")


def machine(
    speeds=(1.0, 1.0, 1.0, 1.0), *, servers: int = 0, link: float = 0.0, apply: float = 0.0, spread: float = 0.0,
    meeting: float = 0.0, beside: bool = False, handling: float = 0.0,
) -> Machine:  # fmt: skip
    """Workers of those speeds whose step takes a second at speed 1; ``link`` seconds for a push and for a pull."""
    return Machine(
        workers=tuple(Worker(step_s=1 / s, push_s=link, pull_s=link) for s in speeds),
        servers=tuple(
            Server(
                receive_s=link / servers,
                send_s=link / servers,
                handling_s=handling / servers,
                apply_s=apply / servers,
                beside=j if beside else None,
            )
            for j in range(servers)
        ),
        spread=spread,
        meeting_s=meeting,
    )


def for_discipline(d: Discipline, **kwargs) -> Machine:
    return machine(servers=d.servers, **kwargs)


HALF = (1.0, 1.0, 1.0, 0.5)


def step_time(name: str, steps: int = 60, **kwargs) -> float:
    d = parse(name)
    return play(d, for_discipline(d, **kwargs), steps=steps).step_time_s


def test_a_server_beside_a_worker_shares_its_processor():
    """Two workers and one server; a cycle of the other worker keeps the shared processor busy for 0.5 s."""
    work = {"speeds": (1.0, 1.0), "link": 0.1, "apply": 0.3, "beside": True}
    free, shared = (step_time("ps_async", handling=h, **work) for h in (0.0, 0.1))
    assert free < shared < free + 0.4
    apart = {**work, "beside": False}
    assert step_time("ps_async", handling=0.1, **apart) == step_time("ps_async", **apart)


@pytest.mark.parametrize("name", [n for n in CLOCKED if n != "fedavg"])
def test_where_nobody_is_slow_and_nothing_is_sent_all_take_a_step_a_second(name):
    assert step_time(name) == pytest.approx(1.0)


def test_window_zero_with_equal_workers_takes_the_time_of_synchronous_training():
    for link in (0.0, 0.3):
        kwargs = {"speeds": (1.0,) * 4, "link": link}
        together = step_time("ps_sync", **kwargs)
        assert step_time("ps_bounded:window=0:max_age=0", apply=0.1, **kwargs) == pytest.approx(
            step_time("ps_sync", apply=0.1, **kwargs)
        )
        assert step_time("ps_bounded:window=0", **kwargs) == pytest.approx(together, rel=1e-3)
    assert play(None, machine(meeting=0.25), steps=20).step_time_s == pytest.approx(1.25)


def test_synchronous_time_in_closed_form():
    """The weights for 4 workers share the link of one server, and so do their gradients."""
    assert step_time("ps_sync", link=0.1, apply=0.05) == pytest.approx(4 * 0.1 + 1 + 4 * 0.1 + 0.05)
    assert step_time("ps_sync", speeds=(1.0,), link=0.1, apply=0.05) == pytest.approx(1.25)
    assert step_time("ps_sync", speeds=(1.0,), link=0.1, apply=0.05) == pytest.approx(1.25)


def test_one_worker_of_four_at_half_speed():
    """The others' work is worth 3.5 workers instead of 4 that go as slowly as the slowest: 1.75 times, for any window
    that the slow worker's gradients do not outgrow."""
    naive = play(None, machine(HALF), steps=200).step_time_s
    assert naive == pytest.approx(2.0)
    assert naive / step_time("ps_async", 200, speeds=HALF) == pytest.approx(1.75, rel=1e-3)
    gains = [
        2.0 / (p.seconds / p.steps)
        for s in (0, 3, 12, 100)
        for d in [parse(f"ps_bounded:window={s}:max_age=none")]
        for p in [play(d, for_discipline(d, speeds=HALF), steps=40)]
    ]
    assert gains == sorted(gains)
    assert gains[0] == pytest.approx(1.0, rel=0.02)
    assert gains[-1] == pytest.approx(1.75, rel=0.02)
    assert naive / step_time("ps_bounded:window=3:max_age=none", 200, speeds=HALF) == pytest.approx(1.75, rel=0.02)
    crawling = (1.0, 1.0, 1.0, 0.05)
    bound, free = (step_time(n, 200, speeds=crawling) for n in ("ps_bounded:window=2", "ps_async"))
    assert bound > 2 * free, "a window holds everybody up where a worker is slower than it allows"


def test_uneven_batches_leave_no_straggler_and_no_staleness():
    shares = tuple(s / sum(HALF) * 4 for s in HALF)
    even = machine(HALF)
    uneven = replace(
        even, workers=tuple(replace(w, rows=r, step_s=w.step_s * r) for w, r in zip(even.workers, shares, strict=True))
    )
    floor = play(None, uneven, steps=50)
    assert floor.step_time_s == pytest.approx(4 / 3.5)
    assert floor.max_age == 0
    assert floor.step_time_s <= step_time("ps_async", 200, speeds=HALF) * (1 + 1e-6)


speeds = st.lists(st.floats(0.2, 3.0), min_size=1, max_size=5).map(tuple)
told = st.sampled_from(
    ["ps_sync", "ps_async", "ps_async:servers=2", "ps_bounded", "ps_bounded:window=1", "ps_bounded:window=0",
     "ps_bounded:window=2:max_age=1", "downpour", "hogwild", "local_sgd", "diloco:period=6:fragments=2:message=int8",
     "diloco:period=6:fragments=2:overlap=2",
     "fedavg:period=3"]
)  # fmt: skip


@settings(max_examples=60)
@example("ps_async", (2.0, 2.0, 2.0), 0.5, 0.0, 0.0, 0)
@given(told, speeds, st.floats(0, 0.5), st.floats(0, 0.2), st.floats(0, 0.4), st.integers(0, 3))
def test_no_discipline_beats_physics_and_none_is_staler_than_its_bound(text, speeds, link, apply, spread, seed):
    d = parse(text)
    if d.servers > len(speeds):
        return
    made = for_discipline(d, speeds=speeds, link=link, apply=apply, spread=0.0, meeting=link)
    found = play(d, made, steps=30, seed=seed)
    assert found.step_time_s >= made.rows / made.fastest * (1 - 1e-9)
    assert found.step_time_s == play(d, made, steps=30, seed=seed).step_time_s
    drawn = play(d, replace(made, spread=spread), steps=30, seed=seed)
    if d.window is not None:
        assert drawn.max_age <= d.window
    if d.max_age is not None:
        assert drawn.max_age <= d.max_age
    if d.synchronous or d.waiting == "local":
        assert drawn.max_age == 0
    assert all(0 <= w <= 1 for w in drawn.waited)


@pytest.mark.parametrize("name", [n for n in CLOCKED if n != "hogwild"])
def test_slower_links_never_make_a_discipline_faster(name):
    d = parse(name)
    times = [
        play(d, for_discipline(d, speeds=HALF, link=k, apply=0.05, meeting=k), steps=60).step_time_s
        for k in (0.0, 0.1, 0.4, 2.0)
    ]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_a_server_is_a_queue_and_more_servers_make_it_shorter():
    """Four workers whose push takes a second of one server's link cannot apply more than one push a second."""
    one = step_time("ps_async", link=1.0)
    assert one >= 4.0
    four = step_time("ps_async:servers=4", link=1.0)
    assert four < 0.8 * one


def test_a_server_beside_a_worker_takes_its_updates_out_of_that_workers_computing():
    own, beside = (play(parse("ps_async"), machine(servers=1, apply=0.2, beside=b), steps=60) for b in (False, True))
    assert beside.step_time_s > own.step_time_s


def test_a_worker_sends_nothing_to_the_server_on_its_own_device():
    """Its messages do not use the link, so the other worker's do not wait for them, nor it for those."""
    d = parse("ps_async")
    one, other = Worker(step_s=1.0), Worker(step_s=1.0, push_s=2.0, pull_s=2.0)
    played = play(d, Machine(workers=(one, other), servers=(Server(receive_s=2.0, send_s=2.0, beside=0),)), steps=100)
    assert played.step_time_s == pytest.approx(2 / (1 + 1 / 5), rel=0.02)


def test_a_quorum_does_not_wait_for_a_worker_that_is_lost():
    lost = (1.0, 1.0, 1.0, 1e-3)
    d = parse("diloco:period=5:quorum=3:grace_s=0.5")
    found = play(d, for_discipline(d, speeds=lost, meeting=0.5), steps=60)
    everybody = parse("diloco:period=5")
    assert found.seconds < play(everybody, for_discipline(everybody, speeds=lost, meeting=0.5), steps=60).seconds / 50
    assert found.step_time_s == pytest.approx((5 + 0.5 + 0.5) / 5 * 4 / 3, rel=0.05)


def test_longer_periods_send_less():
    times = [step_time(f"local_sgd:period={p}", meeting=1.0) for p in (1, 2, 4, 8)]
    assert times == pytest.approx([2.0, 1.5, 1.25, 1.125])


def test_steps_that_overlap_with_an_average_hide_it():
    times = [step_time(f"diloco:period=4:overlap={o}", meeting=2.0) for o in (0, 1, 2, 3)]
    assert times == pytest.approx([1.5, 1.25, 1.0, 1.0])


def test_refusals():
    with pytest.raises(UsageError, match="1 servers, the machine 0"):
        play(parse("ps_async"), machine())
    with pytest.raises(UsageError, match="stages"):
        play(parse("pipedream"), machine())


def test_a_period_longer_than_any_run_takes_no_longer_to_price():
    for name in ("diloco", "downpour"):
        assert step_time(f"{name}:period={LONGEST}", steps=8 * LONGEST, spread=0.1) == pytest.approx(1, rel=0.05)
