"""The measurement of every component at every microbatch and tensor degree, in place, beside the whole model.

Microbatches are the powers of two up to the global batch and the global batch itself, the largest first (the allocator
then reuses its memory). At each of them the chains of all tensor degrees run laps (steps), the first of each untimed to
record memory; at every third microbatch, laps of the whole model alternate with those of the unsplit chain, so that a
disturbance affects both. Time is divided in proportion to the cost of laps. If it is too short, what plans need least
is left out first, with a note: degrees at microbatches too small for them (see :func:`~asa.profiler.effort.is_wanted`),
then the comparison with the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor, nn

from asa.errors import UnavailableError, UsageError
from asa.ir.drift import Drift
from asa.ir.profile import Stat, Timing, WholeStep
from asa.ir.units import GIB
from asa.profiler.chain import Chain, Lap, whole_step
from asa.profiler.clock import Clock, CudaClock, Repeats, quiet, scaled
from asa.profiler.drift import Reference
from asa.profiler.effort import WHOLE, Forecast, is_wanted, microbatches
from asa.profiler.memory import StepMemory, measure_memory
from asa.sharding.collectives.along_axis import stand_ins_kept

_LEAST = 3
_MOST, _MOST_OF_EVENTS = 15, 30
"""Laps at most, on the host and on devices with events, whose steps are short beside the host's disturbances."""
_FIRST = 1.25
"""Factor on the time for the largest microbatch, where every degree is measured."""
_OVER = 1.1
"""Share of the time limit that a measurement may take for one more microbatch."""
_CHECKED = 3
"""The whole model runs at every third microbatch."""
_PROBED, _PROBING = 16, 0.1
"""Number of samples in single steps before any measurement, and the share of time that one size may take."""
_READINGS, _REFERENCE_LAPS, _REFERENCE_SHARE = 16, 4, 0.08
"""Number of readings of the reference, laps per reading, and the share of time that all may take."""
_WAITS = 0.8
"""Host seconds over device seconds of a lap, from which on the device is said to wait for its host."""
_SIDE = 2048
"""Rows and columns of the square matrices whose product shows the speed of a device."""
_Span = tuple[float, float, float]
"""Begin and end of a measurement, and the median of host seconds over device seconds of its laps."""


@dataclass(frozen=True)
class Subject:
    """The model and the chains to measure.

    ``names`` of the components, in order; ``chains`` by tensor degree, negative if tokens are split, too; ``split[t]``:
    the components that degree t really splits (all of them at 1); ``batch(n)``: an input of n samples; ``weight``:
    bytes of the parameters. ``like``: components that equal a measured one, and are not measured themselves.
    """

    model: nn.Module
    names: tuple[str, ...]
    chains: Mapping[int, Chain]
    split: Mapping[int, frozenset[str]]
    batch: Callable[[int], Tensor]
    weight: int
    like: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def alike(self, name: str) -> tuple[str, ...]:
        """Names of the component and of those that its measurements also stand for."""
        return (name, *self.like.get(name, ()))


@dataclass
class Sweep:
    """Results of a measurement. ``host_share``: host seconds over device seconds of a lap; close to 1 if the device
    waits for the host."""

    timings: list[Timing] = field(default_factory=list)
    by_tokens: list[Timing] = field(default_factory=list)
    whole: list[WholeStep] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    host_share: float = 1.0


class Surveyor:
    """Measures one subject within ``time_s`` seconds and ``free_bytes`` of memory."""

    def __init__(
        self,
        subject: Subject,
        clock: Clock,
        *,
        global_batch: int,
        time_s: float,
        free_bytes: int,
        progress: Callable[[float, str], None],
    ) -> None:
        self.subject, self.clock, self.progress = subject, clock, progress
        self._events = isinstance(clock, CudaClock)
        self.global_batch, self.free_bytes = global_batch, free_bytes
        self.time_s, self.end = time_s, time.perf_counter() + time_s
        self.sweep = Sweep()
        self.largest, self.top = max(subject.chains), global_batch
        self._spans: list[_Span] = []  # of each timing
        self._token_spans: list[_Span] = []  # of each with tokens cut
        self._checks: list[_Span] = []  # of each check against the whole model
        self._reference_share = 1.0  # host seconds over device seconds of a lap of the reference
        self._on_device: Reference | None = None  # one that never waits for the host

    def survey(self) -> Sweep:
        """Run the whole measurement."""
        sizes = self._possible(microbatches(self.global_batch))
        self.top = sizes[0]
        self.reference = self._reference(sizes)
        self._on_device = self._product(self.reference.every_s) if self._events else None
        self.read()
        checked = set(sizes[::_CHECKED])
        for i, size in enumerate(sizes):
            if self._events and i > 0 and self._beyond(size, sizes[i + 1 :]):
                self._leave_out(f"microbatch {size}: no time left for it")
                continue
            self.progress(1 - max(0.0, self.end - time.perf_counter()) / self.time_s, f"microbatch {size}")
            slice_s = self._slice(sizes[i:], checked, first=i == 0)
            # A profile has to contain at least one check against the whole model.
            unchecked = size == sizes[-1] and not self.sweep.whole
            chosen = [d for d in self._degrees_at(size, checked) if not (unchecked and d == WHOLE)]
            degrees, least = self._affordable(size, chosen, slice_s, first=i == 0)
            degrees = [WHOLE, *degrees] if unchecked else degrees
            try:
                self._measure(size, degrees, slice_s, least)
            except torch.OutOfMemoryError:
                for chain in self.subject.chains.values():
                    chain.clear()
                torch.cuda.empty_cache()
                self._leave_out(f"microbatch {size}: the device has not enough memory for it")
        self.read()
        return self.sweep

    def read(self, *, due: bool = False) -> None:
        """Take a reading of each reference; with ``due``, only if the last one is old enough."""
        for each in (self.reference, self._on_device):
            if each is not None:
                each.read(due=due)

    @property
    def drift(self) -> Drift | None:
        """Drift of what a step of the largest microbatch waits for: a GPU, or its host."""
        return self._bound_alike(self.sweep.host_share).drift

    def _bound_alike(self, share: float) -> Reference:
        """The reference that waits for the host as laps with this share of host seconds do."""
        if self._on_device is not None and share < _WAITS <= self._reference_share:
            return self._on_device
        return self.reference

    def _beyond(self, size: int, smaller: Sequence[int]) -> bool:
        """Whether there is no time for ``size`` besides the smallest size, which interpolation needs; of sizes that do
        not all fit, every other one is left out."""
        remaining_s, each = self.end - time.perf_counter(), self.forecast.cost
        if not smaller or each(size, [1], _LEAST) + sum(each(s, [1], _LEAST) for s in smaller) <= remaining_s:
            return False
        return len(smaller) % 2 == 1 or each(size, [1], _LEAST) + each(smaller[-1], [1], _LEAST) > remaining_s

    def _slice(self, sizes: Sequence[int], checked: Collection[int], *, first: bool) -> float:
        """Seconds to spend on the first of the remaining ``sizes``: the cost of its least number of laps, and a share
        of the time that is left after those of all sizes; a share of all remaining time if it is too short for them."""
        remaining_s = max(0.0, self.end - time.perf_counter())
        share = self.forecast.seconds(sizes[0]) / sum(self.forecast.seconds(s) for s in sizes)
        share = min(1.0, _FIRST * share) if first else share
        least = [self.forecast.cost(s, self._degrees_at(s, checked), _LEAST) for s in sizes]
        spare = remaining_s - sum(least)
        return least[0] + share * spare if spare > 0 else share * remaining_s

    def _degrees_at(self, size: int, checked: Collection[int]) -> list[int]:
        """Degrees to measure at ``size`` if time allows. Degrees with split tokens, whose times are close to those with
        whole tokens, only if the size is ``checked`` against the whole model."""
        degrees = [
            d
            for d in sorted(self.subject.chains, key=lambda d: (abs(d), -d))
            if is_wanted(size, abs(d), self.top, self.largest) and (d > 0 or size in checked)
        ]
        return [WHOLE, *degrees] if size in checked else degrees

    def _reference(self, sizes: Sequence[int]) -> Reference:
        """A reference from laps of the unsplit chain, at a microbatch small enough to be measured often; from a product
        of matrices if even two readings with the smallest take too long."""
        affordable = _REFERENCE_SHARE * self.time_s / (_READINGS * _REFERENCE_LAPS)
        size = next((s for s in sizes if self.forecast.seconds(s) <= affordable), sizes[-1])
        each = _REFERENCE_LAPS * self.forecast.seconds(size)
        every_s = max(self.time_s / _READINGS, each / _REFERENCE_SHARE)
        if 2 * each > _REFERENCE_SHARE * self.time_s and not self._events:
            return self._product(self.time_s / _READINGS)
        chain, x = self.subject.chains[1], self.subject.batch(size)

        def lap() -> float:
            result = chain.lap(x, self.clock)
            chain.clear()
            self._reference_share = result.host_share
            return result.seconds

        return Reference(lap, every_s=every_s)

    def _product(self, every_s: float) -> Reference:
        """A reference from a product of two matrices, large enough to outlast its launch on a GPU."""
        matrix = torch.randn(_SIDE, _SIDE, device=self.subject.chains[1].device)

        return Reference(lambda: self.clock.timed(lambda: matrix @ matrix), every_s=every_s)

    def steadied(self) -> Sweep:
        """Results of :meth:`survey`, converted to the machine's mean speed over all readings of ``reference``.

        On a GPU small laps show the speed of the host. A lap for which the device does not wait for its host is
        converted by a matrix product instead.
        """
        timings = self._steadied(self.sweep.timings, self._spans)
        by_tokens = self._steadied(self.sweep.by_tokens, self._token_spans)
        whole_steps = [
            replace(w, whole=scaled(w.whole, f), components_s=f * w.components_s)
            for w, f in zip(self.sweep.whole, map(self._factor, self._checks), strict=True)
        ]
        return replace(self.sweep, timings=timings, by_tokens=by_tokens, whole=whole_steps)

    def _factor(self, span: _Span) -> float:
        begun, ended, share = span
        return self._bound_alike(share).factor(begun, ended)

    def _steadied(self, timings: Sequence[Timing], spans: Sequence[_Span]) -> list[Timing]:
        factors = [self._factor(span) for span in spans]
        return [
            replace(t, forward=scaled(t.forward, f), backward=scaled(t.backward, f))
            for t, f in zip(timings, factors, strict=True)
        ]

    def _possible(self, sizes: Sequence[int]) -> list[int]:
        """The sizes that normalization, memory and time allow, judged from single steps at small microbatches."""
        least = self._least_trainable(sizes)
        possible = [s for s in sizes if s >= least]
        began = time.perf_counter()
        probes: list[tuple[int, float]] = []
        chain, saved = self.subject.chains[1], 0
        for size in reversed(possible):
            if probes and size < 4 * probes[-1][0]:
                continue
            if self._events and probes and time.perf_counter() - began > _PROBING * self.time_s:
                break  # each size has kernels to choose or to compile
            # Two steps: one records memory, one is timed.
            if probes and 2 * probes[-1][1] * size / probes[-1][0] > _PROBING * self.time_s:
                break
            x = self.subject.batch(size)
            try:
                memory = zip(self.subject.names, measure_memory(chain, x).components, strict=True)
                saved = sum(h.saved * len(self.subject.alike(name)) for name, h in memory)
                started = time.perf_counter()
                lap = chain.lap(x, self.clock)
                probes.append((size, time.perf_counter() - started))
            except torch.OutOfMemoryError:
                raise UnavailableError(f"the device has not enough memory for a step of {size} samples") from None
            chain.clear()
            if size >= _PROBED:
                break
        each = [f + b for f, b in zip(lap.forward, lap.backward, strict=True)]
        every = sum(t * len(self.subject.alike(n)) for n, t in zip(self.subject.names, each, strict=True))
        self.forecast = Forecast(probes[-2:][0], probes[-1], every / max(sum(each), 1e-12))
        for size in [s for s in possible if s > probes[-1][0]]:
            needed = saved * size / probes[-1][0] + 2 * self.subject.weight
            seconds = self._least_s(possible[possible.index(size) :])
            if needed > self.free_bytes:
                self._leave_out(f"microbatch {size}: needs {needed / GIB:.1f} GiB, {self.free_bytes / GIB:.1f} free")
            elif seconds > _OVER * self.time_s:
                said = f"it and smaller ones would take {seconds:.0f} s, {self.time_s:.0f} s are left"
                self._leave_out(f"microbatch {size}: {said}")
            else:
                continue
            possible.remove(size)
        return possible

    def _least_s(self, sizes: Sequence[int]) -> float:
        """Seconds of the least that is measured at these sizes: each degree at the first, which is the largest, degree
        1 at all, and the whole model at the last."""
        cost = self.forecast.cost
        degrees_s = cost(sizes[0], [d for d in self.subject.chains if d != 1], 1)
        return degrees_s + sum(cost(s, [1], _LEAST) for s in sizes) + cost(sizes[-1], [WHOLE], _LEAST)

    def _least_trainable(self, sizes: Sequence[int]) -> int:
        """The smallest microbatch that normalization layers accept in training; notes what they refuse."""
        for size in reversed(sizes):
            try:
                with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                    value = self.subject.batch(size)
                    for component in self.subject.chains[1].components:
                        value = component(value)[0]
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                self._leave_out(f"microbatch {size}: batch normalisation cannot train on one value per channel")
                continue
            return size
        raise UsageError(
            f"the model trains at no microbatch up to {self.global_batch}, its batch normalisation needs more than one "
            "value per channel; try a larger global batch or input"
        )

    def _affordable(self, size: int, chosen: list[int], slice_s: float, *, first: bool) -> tuple[list[int], int]:
        """The degrees among ``chosen`` to measure at ``size``, always including 1, and the least number of laps.

        At the ``first`` (largest) microbatch all degrees are measured, since a planner would know nothing of the
        others; if time is too short for three laps, they get one.
        """
        degrees, with_whole, cost = [d for d in chosen if d != WHOLE], WHOLE in chosen, self.forecast.cost
        fits = self.forecast.fits(size, chosen, _LEAST, slice_s)
        if first and not fits:
            always = [d for d in chosen if d in (1, WHOLE)]
            least_s = cost(size, always, _LEAST) + cost(size, [d for d in chosen if d not in always], 1)
            if with_whole and least_s > slice_s:
                chosen = degrees
                self._leave_out_degree(size, WHOLE)
            return chosen, 1
        optional = [d for d in reversed(degrees) if d < 0]
        optional += [d for d in reversed(degrees) if size * self.largest < self.top * d > self.top]
        optional += [WHOLE] if with_whole else []
        optional += [d for d in reversed(degrees) if d > 1 and d not in optional]
        while optional and not self.forecast.fits(size, chosen, _LEAST, slice_s):
            chosen.remove(optional[0])
            self._leave_out_degree(size, optional.pop(0))
        return chosen, _LEAST

    def _leave_out_degree(self, size: int, degree: int) -> None:
        what = "check against the whole model" if degree == WHOLE else f"tensor degree {abs(degree)}"
        what += " with tokens cut" if degree < 0 else ""
        self._leave_out(f"{what} at microbatch {size}: no time left for it")

    def _measure(self, size: int, degrees: Sequence[int], slice_s: float, least: int) -> None:
        """Run laps of each degree, one degree after the other; laps of the whole model alternate with those of degree
        1.

        A lap depends on the state in which the last one left the allocator, so equal laps must follow each other.
        """
        x, end = self.subject.batch(size), time.perf_counter() + slice_s
        remaining = sum(self.forecast.lap(size, d) for d in degrees)
        for degree in (d for d in degrees if d != WHOLE):
            with_whole = degree == 1 and WHOLE in degrees
            cost = self.forecast.lap(size, degree) + with_whole * self.forecast.lap(size, WHOLE)
            share, remaining = cost / remaining, remaining - cost
            if self._events and degree != 1 and time.perf_counter() + self.forecast.cost(size, [degree], 1) > self.end:
                self._leave_out_degree(size, degree)  # choosing kernels took longer than was to be expected
                continue
            finish = time.perf_counter() + (end - time.perf_counter()) * share
            self._alternate(size, degree, x, finish, _LEAST if degree == 1 else least, with_whole=with_whole)

    def _alternate(self, size: int, degree: int, x: Tensor, finish: float, least: int, *, with_whole: bool) -> None:
        self.read(due=True)
        chain, laps, unmarked, whole_steps = self.subject.chains[degree], list[Lap](), list[float](), list[float]()
        entered = time.perf_counter()
        if self._events:
            chain.lap(x, self.clock)  # tries kernels, whose workspaces later steps do not hold
        memory = measure_memory(chain, x)
        if with_whole:
            self._time_whole(x)
        most = _MOST_OF_EVENTS if self._events else _MOST
        repeats = Repeats(slice_s=finish - time.perf_counter(), least=least, most=most)
        started, begun = time.perf_counter(), self.reference.now()
        with quiet(), stand_ins_kept() if degree < 0 else nullcontext():
            while repeats.goes_on([unmarked or [lap.seconds for lap in laps], *([whole_steps] if with_whole else [])]):
                laps.append(chain.lap(x, self.clock))
                chain.clear()
                if self._events:
                    unmarked.append(chain.seconds(x, self.clock))
                    chain.clear()
                if with_whole:
                    whole_steps.append(self._time_whole(x))
        # The forecast is of wall time, which includes other processes and the overhead of the marks.
        spent = [sum(lap.seconds for lap in laps) + sum(unmarked), sum(whole_steps)]
        stretch = (time.perf_counter() - started) / max(sum(spent), 1e-9) / len(laps)
        before = (started - entered) / (1 + with_whole) if self._events else 0.0
        self.forecast.learn(size, degree, spent[0] * stretch, before)
        span = (begun, self.reference.now(), median(lap.host_share for lap in laps))
        self._record(size, degree, laps, unmarked, memory, span)
        if with_whole:
            self.forecast.learn(size, WHOLE, spent[1] * stretch, before)
            self._check(size, whole_steps)
            self._checks.append(span)
        if degree == 1 and size == self.top:
            self.sweep.host_share = min(lap.host_share for lap in laps)

    def _check(self, size: int, whole_steps: Sequence[float]) -> None:
        parts = (t for t in self.sweep.timings if t.microbatch == size and t.tensor_degree == 1)
        total = sum(t.forward.median + t.backward.median for t in parts)
        self.sweep.whole.append(WholeStep(microbatch=size, whole=Stat.of(whole_steps), components_s=total))

    def _time_whole(self, x: Tensor) -> float:
        chain = self.subject.chains[1]
        return whole_step(self.subject.model, x, self.clock, chain.device, chain.precision)

    def _record(
        self, size: int, degree: int, laps: Sequence[Lap], unmarked: Sequence[float], memory: StepMemory,
        span: _Span,
    ) -> None:  # fmt: skip
        # Interruptions are rare in one component but common in a lap, so the medians of the components sum to less than
        # the median lap. All are scaled by one factor, so that they sum to it; to one without marks where these are
        # work of the host that the device waits for.
        forward = [Stat.of(times) for times in zip(*(lap.forward for lap in laps), strict=True)]
        backward = [Stat.of(times) for times in zip(*(lap.backward for lap in laps), strict=True)]
        parts = sum(stat.median for stat in (*forward, *backward))
        factor = Stat.of(unmarked or [lap.seconds for lap in laps]).median / parts if parts else 1.0
        timings, spans = (self.sweep.timings, self._spans) if degree > 0 else (self.sweep.by_tokens, self._token_spans)
        for i, name in enumerate(self.subject.names):
            for each in self.subject.alike(name) if name in self.subject.split[degree] else ():
                spans.append(span)
                timings.append(
                    Timing(
                        component=each,
                        microbatch=size,
                        tensor_degree=abs(degree),
                        forward=scaled(forward[i], factor),
                        backward=scaled(backward[i], factor),
                        saved_bytes=memory.components[i].saved,
                        transient_bytes=memory.components[i].transient,
                        unmade_bytes=memory.components[i].unmade,
                    )
                )

    def _leave_out(self, what: str) -> None:
        if what not in self.sweep.skipped:
            self.sweep.skipped.append(what)
