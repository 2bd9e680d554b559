"""The sweep over microbatches and degrees, and what it leaves out when time, memory or normalisation forbid."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from asa.errors import UsageError
from asa.profiler import components
from asa.profiler.chain import Chain
from asa.profiler.clock import HostClock
from asa.profiler.components import Subject, Surveyor
from asa.profiler.effort import Forecast, degrees_up_to, is_wanted, line_through, microbatches

CPU = torch.device("cpu")


class Piece(nn.Module):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.body(x),)


@pytest.mark.parametrize(
    ("degree", "expected"),
    [(1, [64, 32, 16, 8, 4, 2, 1]), (2, [64, 32, 16, 4, 1]), (4, [64, 32, 8, 2]), (8, [64, 16, 4, 1])],
)
def test_a_degree_is_measured_where_plans_for_the_largest_degree_use_it(degree, expected):
    assert [m for m in microbatches(64) if is_wanted(m, degree, 64, 8)] == expected


def _subject(*, norm: bool = False, width: int = 32) -> Subject:
    first = nn.Sequential(nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []))
    second = nn.Linear(width, 4)
    half = Piece(nn.Linear(width, width // 2), nn.Linear(width // 2, width))
    return Subject(
        model=nn.Sequential(first, second),
        names=("first", "second"),
        chains={1: Chain([Piece(first), Piece(second)], CPU, "fp32"), 2: Chain([half, Piece(second)], CPU, "fp32")},
        split={1: frozenset({"first", "second"}), 2: frozenset({"first"})},
        batch=lambda n: torch.randn(n, width),
        weight=1000,
    )


def _survey(subject: Subject, *, time_s: float = 300.0, free_bytes: int = 1 << 40, global_batch: int = 8):
    said: list[float] = []
    surveyor = Surveyor(
        subject,
        HostClock(),
        global_batch=global_batch,
        time_s=time_s,
        free_bytes=free_bytes,
        progress=lambda fraction, _: said.append(fraction),
    )
    return surveyor.survey(), said


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, [1]), (8, [8, 4, 2, 1]), (48, [48, 32, 16, 8, 4, 2, 1]), (3, [3, 2, 1])]
)
def test_microbatches_are_the_powers_of_two_and_the_batch_itself(batch, expected):
    assert microbatches(batch) == expected


@pytest.mark.parametrize(
    ("largest", "splittable", "expected"),
    [(8, [64, 12], [1, 2, 4, 8]), (8, [6], [1, 2, 4]), (6, [64], [1, 2, 4]), (8, [], [1]), (1, [64], [1])],
)
def test_degrees_end_at_the_most_divisible_component(largest, splittable, expected):
    assert degrees_up_to(largest, splittable) == expected


def test_every_component_is_timed_at_every_microbatch_and_degree_that_splits_it():
    sweep, said = _survey(_subject())
    expected = {(name, m, 1) for name in ("first", "second") for m in (8, 4, 2, 1)}
    expected |= {("first", m, 2) for m in (8, 2)}
    assert {(t.component, t.microbatch, t.tensor_degree) for t in sweep.timings} == expected
    assert len(sweep.timings) == len(expected)
    for timing in sweep.timings:
        for stat in (timing.forward, timing.backward):
            assert 0 < stat.p10 <= stat.median <= stat.p90
            assert stat.n >= 3
    assert sweep.skipped == []
    assert said == sorted(said)
    assert all(0 <= fraction <= 1 for fraction in said)


def test_saved_bytes_grow_with_the_microbatch_by_hand():
    """``first`` keeps its output for ``second``: 32 words a sample; its half keeps 16 more."""
    sweep, _ = _survey(_subject())
    for t in sweep.timings:
        if t.component == "first":
            assert t.saved_bytes == t.microbatch * 4 * (32 if t.tensor_degree == 1 else 48)


def test_the_check_compares_with_the_sum_of_the_timings():
    sweep, _ = _survey(_subject())
    assert [w.microbatch for w in sweep.whole] == [8, 1]
    for w in sweep.whole:
        parts = [t for t in sweep.timings if t.microbatch == w.microbatch and t.tensor_degree == 1]
        assert w.components_s == pytest.approx(sum(t.forward.median + t.backward.median for t in parts))
        assert w.whole.median > 0


def test_a_microbatch_that_normalisation_refuses_is_skipped_and_said():
    sweep, _ = _survey(_subject(norm=True))
    assert {t.microbatch for t in sweep.timings} == {8, 4, 2}
    assert sweep.skipped == ["microbatch 1: batch normalisation cannot train on one value per channel"]


def test_a_model_that_trains_at_no_microbatch_is_refused():
    with pytest.raises(UsageError, match="no microbatch up to 1"):
        _survey(_subject(norm=True), global_batch=1)


def test_other_errors_of_the_model_are_its_own():
    subject = _subject()
    broken = Subject(**{**vars(subject), "batch": lambda n: torch.randn(n, 5)})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _survey(broken)


def test_microbatches_beyond_the_free_memory_are_skipped_and_said():
    sweep, _ = _survey(_subject(width=256), free_bytes=100_000, global_batch=256)
    assert max(t.microbatch for t in sweep.timings) < 256
    assert any(s.startswith("microbatch 256: needs") for s in sweep.skipped)


def test_without_time_the_most_needed_is_still_measured_and_the_rest_is_said():
    sweep, _ = _survey(_subject(), time_s=1e-9)
    assert {t.component for t in sweep.timings} == {"first", "second"}
    assert all(t.forward.n >= 3 for t in sweep.timings if t.tensor_degree == 1)
    largest = max(t.microbatch for t in sweep.timings)
    assert [t.microbatch for t in sweep.timings if t.tensor_degree == 2] == [largest]
    assert [s.partition(":")[0] for s in sweep.skipped[:3]] == ["microbatch 8", "microbatch 4", "microbatch 2"]
    assert [w.microbatch for w in sweep.whole] == [1]


def test_no_step_is_tried_that_takes_much_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lap of 20 ms a sample: of 4 s, a tenth is enough for one of 4 samples, not for one of 16."""
    tried, forwards, now = list[int](), list[int](), [0.0]
    monkeypatch.setattr(components, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                tried.append(len(x))
                now[0] += 0.02 * len(x)
            else:
                forwards.append(len(x))
            return super().forward(x)

    subject = _subject()
    slow = Slow(32, 4)
    subject = replace(subject, chains={1: Chain([Piece(nn.Linear(32, 32)), Piece(slow)], CPU, "fp32")})
    surveyor = Surveyor(
        subject, HostClock(), global_batch=64, time_s=4.0, free_bytes=1 << 40, progress=lambda _f, _w: None
    )
    possible = surveyor._possible(microbatches(64))
    assert tried == [1, 1, 4, 4]
    assert possible == [16, 8, 4, 2, 1], "three laps of 32 samples and fewer, and what comes before, take 5.6 s"
    assert forwards == [1], "the smallest size is tried once, for all sizes"


def test_a_line_through_two_points_predicts_the_third_and_never_falls():
    assert line_through((4, 1.0), (16, 2.0))(64) == pytest.approx(6.0)
    assert line_through((4, 1.0), (4, 1.0))(8) == pytest.approx(2.0)
    assert line_through((4, 2.0), (16, 1.0))(64) == pytest.approx(1.0)


def test_a_forecast_starts_from_a_line_and_learns():
    forecast = Forecast((4, 1.0), (16, 2.0))
    assert forecast.lap(64, 1) == pytest.approx(6.0)
    assert forecast.lap(64, 4) < forecast.lap(64, 1)
    forecast.learn(64, 4, 3.0)
    assert forecast.lap(16, 4) == pytest.approx(1.0)
    assert forecast.fits(16, [1, 4], 3, slice_s=12.7)
    assert not forecast.fits(16, [1, 4], 3, slice_s=12.5)
    forecast.learn(64, 4, 3.0, before=7.0)
    assert forecast.cost(16, [4], 3) == pytest.approx(3 * 1.0 + 7.0), "what came before does not shrink with the size"
