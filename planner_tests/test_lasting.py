"""What is said of a machine's own usual: nothing; and how often a run saves whose ranks are lost."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import nouns
import pytest
from tables import some

from asa.executor.training.saving import SaveClock
from asa.interfaces.executor import Probe
from asa.ir.measurements import Measurements, RankTiming, Transfer
from asa.ir.profile import Stat
from asa.scheduler.costs import LIKE, Costs, Slowness
from asa.scheduler.findings import Finding, Findings
from asa.scheduler.lasting import Lasting, UsualVariation
from asa.scheduler.relative import Compared
from asa.scheduler.shape import Message

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import clean

STEPS = 5


class _Promise:
    step_s = 0.1
    own_s = (0.1, 0.1)

    def message(self, _: object) -> None:
        return None


def _window(own: tuple[float, float] = (0.1, 0.1), stolen: tuple[float | None, ...] = (0.0, 0.0)) -> Measurements:
    ranks = tuple(
        RankTiming(own_s=s, waiting_s=0.0, data_wait_s=0.0, stolen_share=share)
        for s, share in zip(own, stolen, strict=True)
    )
    return Measurements(
        plan_fingerprint="", strategy="ddp", num_ranks=2, global_batch=8, step_time=Stat.of([max(own)] * STEPS),
        predicted_step_time_s=0.1, communication_s=None, data_wait_s=0.0, peak_memory_bytes=None,
        predicted_memory_bytes=(1, 1), per_rank=ranks,
    )  # fmt: skip


def _said(findings: Findings, logs: tuple[float, ...], windows: int, **figures: object) -> list[tuple[int, Finding]]:
    common = min(logs)
    now = Slowness(common=common, ranks=tuple(x - common for x in logs), levels=(0.0,))
    measured = _window(tuple(0.1 * math.exp(x) for x in logs), **figures)  # type: ignore[arg-type]
    return [
        (i, f)
        for i in range(windows)
        for f in findings.slow(now, measured, _Promise(), (0, 1), by_rank=True, steps=STEPS)  # type: ignore[arg-type]
    ]


def _findings() -> Findings:
    return Findings(nouns.cluster(2), Slowness(common=0.0, ranks=(0.0, 0.0), levels=(0.0,)))


@pytest.mark.parametrize("stolen", [(0.0, 0.4), (None, None)])
def test_a_rank_whose_core_others_have_is_named_at_once_and_so_it_is_where_no_system_tells(stolen) -> None:
    ((at, found),) = _said(_findings(), (0.0, 0.7), 3, stolen=stolen)
    assert (at, found.cause, found.where) == (0, "compute", 1)


def test_what_nothing_else_bears_out_is_named_once_it_lasts_and_over_when_it_is() -> None:
    findings = _findings()
    assert [at for at, _ in _said(findings, (0.0, 0.7), 10)] == [3]  # three seconds of steps of 0.2 s
    ((at, over),) = _said(findings, (0.0, 0.0), 12)
    assert (at, over.ended) == (6, True)
    assert _said(findings, (0.0, 0.7), 2) == []
    assert _said(findings, (0.0, 0.0), 20) == []


def test_a_rank_that_was_slow_now_and_then_is_named_when_it_stays_slow() -> None:
    findings = _findings()
    assert [_said(findings, (0.0, float(i % 2)), 1) for i in range(40)] == [[]] * 40
    assert findings.variation.like > 1.0
    ((at, found),) = _said(findings, (0.0, 1.0), 30)
    assert (found.where, found.factor) == (1, pytest.approx(math.e))
    assert at < 12


def test_what_all_ranks_have_in_common_takes_longer_to_believe_and_faster_than_promised_is_no_news() -> None:
    findings = _findings()
    ((at, found),) = _said(findings, (0.7, 0.7), 20)
    assert (at, found.where) == (12, None)
    assert _said(_findings(), (-0.4, -0.4), 40) == []


@pytest.mark.parametrize("compared", [False, True], ids=["predicted", "compared"])
def test_what_the_last_steps_deny_is_not_reported(compared: bool) -> None:
    """Rank 0 seemed slower for a while; then rank 1 becomes slow, and rank 0 is faster than ever."""
    costs, findings, relative = Costs(2, 1), _findings(), Compared(2)
    lines: list[str] = []
    for own, windows in (((0.1, 0.1), 4), ((0.116, 0.1), 6), ((0.08, 0.21), 6)):
        for _ in range(windows):
            measured = _window(own, stolen=(0.0, 0.5 if own[1] > 0.2 else 0.0))
            if compared:
                found = relative.window(measured, 2)
            else:
                costs.observe(measured, _Promise(), (0, 1), 2, ())
                found = findings.slow(
                    costs.slowness(), measured, _Promise(), (0, 1), by_rank=True, steps=2, doubts=costs.doubts()
                )  # type: ignore[arg-type]
            lines += [f.line for f in found if f.where == 0 and not f.ended]
    assert lines == []


def test_plans_are_made_for_all_ranks_as_they_are_when_one_is_found_slow() -> None:
    findings = _findings()
    assert len(_said(findings, (-0.2, 0.6), 12, stolen=(0.0, 0.5))) == 1
    assert findings.planned == Slowness(common=-0.2, ranks=(0.0, pytest.approx(0.8)), levels=(0.0,))


def test_a_rank_slower_than_others_but_not_than_promised_is_told_so() -> None:
    found = _said(_findings(), (-0.4, 0.0), 20)
    assert [f.line.split(" (")[0] for _, f in found] == ["rank 1's compute takes 1.49 times as long as that of others"]


def test_a_difference_must_be_beyond_what_windows_of_the_run_differ_by() -> None:
    usual = UsualVariation()
    assert usual.like == LIKE
    for i in range(20):
        usual.window(_window((0.1 * (1.0, 1.25)[i % 2], 0.1)), (0, 1))
    assert 0.25 < usual.like < 0.6
    calm = UsualVariation()
    for i in range(20):
        calm.window(_window((0.1 * (1.0, 1.02)[i % 2], 0.1)), (0, 1))
    assert calm.like == LIKE


def test_the_change_itself_is_no_usual_variation() -> None:
    usual = UsualVariation()
    for i in range(14):
        usual.window(_window((0.1, 0.1 if i < 5 else 0.2)), (0, 1))
        assert usual.like == LIKE


def test_differences_that_come_and_go_last_for_nothing() -> None:
    lasting = Lasting()
    for i in range(30):
        assert not lasting.holds("x", differs=i % 3 != 0, steps=5, seconds=2.0, borne_out=False)


def test_the_shortest_of_three_probes_counts() -> None:
    costs = Costs(2, 1)
    for _ in range(4):
        costs.observe(_window(), _Promise(), (0,), STEPS, ())
    for seconds in (2.0, 0.02, 2.0, 0.06, 0.02, 0.06, 0.02):
        costs.probed(Probe(compute_s=(0.02, seconds)), (0,), _Promise(), STEPS)
    assert costs.ranks[1].ratio == pytest.approx(1.0, rel=0.1)
    for _ in range(6):
        costs.probed(Probe(compute_s=(0.02, 0.06)), (0,), _Promise(), STEPS)
    assert costs.ranks[1].ratio == pytest.approx(3.0, rel=0.1)


def test_what_is_derived_of_a_link_does_not_erase_what_probes_show() -> None:
    class Pipeline(_Promise):
        def message(self, transfer: Transfer) -> Message:  # type: ignore[override]
            return Message(carried_bytes=1e6, expected_s=0.01, seconds=transfer.seconds, n=transfer.n)

    costs, slow = Costs(2, 1), (0, math.log(4.0))
    recovered = Transfer(op="all_reduce", level=0, group_size=2, num_bytes=1e6, seconds=0.01, n=5)
    for _ in range(3):
        costs.observe(_window(), Pipeline(), (0, 1), STEPS, (), slow)
    assert costs.levels[0].ratio == pytest.approx(4.0)
    for _ in range(3):  # of a pipeline, exposed communication is waiting, and comes to what was believed before
        costs.probed(Probe(compute_s=(), links=(recovered,)), (0, 1), Pipeline(), STEPS)
        costs.observe(_window(), Pipeline(), (0, 1), STEPS, (), slow)
    assert costs.levels[0].ratio == pytest.approx(1.0)
    costs.moved()  # under another plan, what is derived counts until a level was probed again
    for _ in range(6):
        costs.observe(_window(), Pipeline(), (0, 1), STEPS, (), slow)
    assert costs.levels[0].ratio == pytest.approx(4.0)


TRACES = sorted(clean.TRACES.glob("*.gz"))


@pytest.mark.parametrize("trace", some(TRACES, [t for t in TRACES if t.name != "cnn-b256.gz"]), ids=lambda p: p.name)
def test_nothing_is_said_of_real_runs_that_nobody_disturbed(trace: Path) -> None:
    assert clean.replay(trace)["false_alarms"] == []


def test_a_run_whose_ranks_are_lost_saves_as_often_as_that_is_worth() -> None:
    calm = SaveClock(10.0)
    assert not calm.trained(9.0)
    assert calm.trained(1.0)
    calm.saved(1.0)
    assert calm.interval_s == 10.0
    assert SaveClock().interval_s == math.inf
    lost = SaveClock(10.0, between_losses_s=50.0)
    assert lost.trained(5.0)  # the first one tells how long it takes
    lost.saved(0.25)
    assert lost.interval_s == pytest.approx(5.0)
    assert SaveClock(1.0, between_losses_s=50.0).interval_s == 1.0


def test_ranks_are_compared_by_the_steps_of_a_window_and_not_by_all_since_the_start() -> None:
    """A resumed run begins after many steps, and its first window is short."""
    slow = _window((0.1, 0.2), (None, None))
    compared = Compared(2)
    assert compared.window(slow, 5000) == []
    assert [f.where for f in compared.window(slow, STEPS)] == [1]


def test_a_rank_that_reports_what_cannot_be_is_named_where_ranks_are_only_compared() -> None:
    compared, odd = Compared(2), _window((0.1, 0.1))
    odd = replace(odd, per_rank=(odd.per_rank[0], replace(odd.per_rank[1], own_s=math.nan)))
    lines = [f.line for _ in range(3) for f in compared.window(odd, STEPS)]
    assert lines == ["figures of rank 1 are ignored: nan s of computing in a step of 0.1 s"]
    assert [f.line for f in compared.window(_window(), STEPS)] == ["figures of rank 1 are used again"]


def test_a_loop_of_ones_own_waits_as_long_before_it_says_that_a_rank_is_slow() -> None:
    mood, shared = _window((0.1, 0.2)), _window((0.1, 0.2), (0.0, 0.5))
    compared = Compared(2)
    assert [len(compared.window(w, STEPS)) for w in (*[mood] * 3, *[_window()] * 4)] == [0] * 7
    assert any(compared.window(mood, STEPS) for _ in range(8))
    again = Compared(2)
    lines = [again.window(w, STEPS) for w in (_window(), _window(), shared, shared)]
    assert (lines[-1][0].where, lines[-1][0].factor) == (1, pytest.approx(2.0))
    assert lines[-1][0].line.startswith("rank 1 takes 2 times as long as others")
