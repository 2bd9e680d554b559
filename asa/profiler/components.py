"""The sweep: every component at every microbatch and tensor degree, in place, beside the whole model.

Microbatches are the powers of two up to the global batch and the global batch itself, the largest first (the
allocator then reuses what it has). At each of them the chains of all tensor degrees run their laps, the first of
each untimed, recording its memory; the whole model's laps alternate with the unsplit chain's, so that a
disturbance hits both alike. Time is divided by what laps cost. Where it does not suffice, what a plan can do
without is left out first, and said: degrees at microbatches too small for them, then the check against the whole
model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from asa.errors import UsageError
from asa.ir.profile import Stat, Timing, WholeStep
from asa.ir.units import GIB
from asa.profiler.chain import Chain, Lap, whole_step
from asa.profiler.clock import Clock, Repeats, line_through, quiet, scaled
from asa.profiler.memory import StepMemory, measure_memory

WHOLE = 0
"""Where a tensor degree is expected: the whole, unsplit model."""

_LEAST = 3
_MOST = 15


@dataclass(frozen=True)
class Subject:
    """What is measured.

    ``names`` of the components, in order; ``chains`` by tensor degree; ``split[t]``: the components that degree t
    really splits (all of them at 1); ``batch(n)`` is an input of n samples; ``weight`` the bytes of the parameters.
    """

    model: nn.Module
    names: tuple[str, ...]
    chains: Mapping[int, Chain]
    split: Mapping[int, frozenset[str]]
    batch: Callable[[int], Tensor]
    weight: int


@dataclass
class Sweep:
    """What was found. ``host_share``: host seconds over device seconds of a lap, at most 1 where the device waits."""

    timings: list[Timing] = field(default_factory=list)
    whole: list[WholeStep] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    host_share: float = 1.0


def microbatches(global_batch: int) -> list[int]:
    """Powers of two up to ``global_batch``, and itself; largest first.

    >>> microbatches(48)
    [48, 32, 16, 8, 4, 2, 1]
    """
    powers = [1 << k for k in range(global_batch.bit_length()) if 1 << k < global_batch]
    return [global_batch, *reversed(powers)]


class Surveyor:
    """Measures one subject within ``time_s`` seconds, as far as ``free_bytes`` of memory allow."""

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
        self.global_batch, self.free_bytes = global_batch, free_bytes
        self.end = time.perf_counter() + time_s
        self.time_s = time_s
        self.sweep = Sweep()
        self.seconds: Callable[[int], float] = lambda _samples: 0.0
        self.measured: dict[int, tuple[int, float]] = {}
        self.largest = max(subject.chains)

    def survey(self) -> Sweep:
        """Measure."""
        sizes = self._possible(microbatches(self.global_batch))
        checked = set(sizes[::2])
        for i, size in enumerate(sizes):
            self.progress(1 - max(0.0, self.end - time.perf_counter()) / self.time_s, f"microbatch {size}")
            share = size**0.8 / sum(s**0.8 for s in sizes[i:])
            slice_s = max(0.0, self.end - time.perf_counter()) * share
            degrees = self._affordable(size, slice_s, with_whole=size in checked)
            try:
                self._measure(size, degrees, slice_s)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                self.sweep.skipped.append(f"microbatch {size}: the device has not enough memory for it")
        return self.sweep

    def _possible(self, sizes: Sequence[int]) -> list[int]:
        """Leave out what normalisation, memory or time rule out, judging by single steps at small microbatches."""
        possible = [s for s in sizes if s >= self._least_trainable(sizes)]
        probes: list[tuple[int, float]] = []
        chain, saved = self.subject.chains[1], 0
        for size in (s for s in reversed(possible) if s >= min(4, self.global_batch)):
            if probes and size < 4 * probes[0][0]:
                continue
            x = self.subject.batch(size)
            saved = sum(h.saved for h in measure_memory(chain, x).components)
            probes.append((size, chain.lap(x, self.clock).seconds))
            chain.clear()
            if len(probes) == 2:
                break
        self.seconds = line_through(probes[0], probes[-1])
        for size in [s for s in possible if s > probes[-1][0]]:
            needed = saved * size / probes[-1][0] + 2 * self.subject.weight
            seconds = (_LEAST + 2) * self.seconds(size)
            if needed > self.free_bytes:
                self._leave_out(f"microbatch {size}: needs {needed / GIB:.1f} GiB, {self.free_bytes / GIB:.1f} free")
            elif seconds > 0.6 * self.time_s:
                self._leave_out(f"microbatch {size}: {_LEAST} repeats would take {seconds:.0f} s of {self.time_s:.0f}")
            else:
                continue
            possible.remove(size)
        return possible

    def _least_trainable(self, sizes: Sequence[int]) -> int:
        """The smallest microbatch that normalisation layers accept in training; what they refuse is noted."""
        for size in reversed(sizes):
            try:
                with torch.no_grad():
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

    def _cost(self, size: int, degree: int) -> float:
        """Expected seconds of a lap: scaled from what that degree took last, guessed where it has not run yet."""
        if degree in self.measured:
            last, seconds = self.measured[degree]
            return seconds * self.seconds(size) / self.seconds(last)
        return self.seconds(size) * (0.25 + 0.75 / max(degree, 1))

    def _affordable(self, size: int, slice_s: float, *, with_whole: bool) -> list[int]:
        """Degrees to measure at ``size``, in the order of their turns; 1 always is among them."""
        chosen = [*([WHOLE] if with_whole else []), *sorted(self.subject.chains)]
        optional = [d for d in reversed(chosen) if d > 1 and size * self.largest < self.global_batch * d]
        optional += [WHOLE] if with_whole else []
        optional += [d for d in reversed(chosen) if d > 1 and d not in optional]
        for degree in optional:
            if sum(self._cost(size, d) * (_LEAST + 1.5) for d in chosen) <= slice_s:
                break
            chosen.remove(degree)
            what = "check against the whole model" if degree == WHOLE else f"tensor degree {degree}"
            self._leave_out(f"{what} at microbatch {size}: no time left for it")
        return chosen

    def _measure(self, size: int, degrees: Sequence[int], slice_s: float) -> None:
        """Laps of each degree, one degree after the other; the whole model's laps alternate with those of degree 1.

        A lap finds the allocator as the last one left it, so like must follow like, as in training.
        """
        x, end = self.subject.batch(size), time.perf_counter() + slice_s
        left = sum(self._cost(size, d) for d in degrees)
        for degree in (d for d in degrees if d != WHOLE):
            beside = degree == 1 and WHOLE in degrees
            chain, laps, whole = self.subject.chains[degree], list[Lap](), list[float]()
            cost = self._cost(size, degree) + beside * self._cost(size, WHOLE)
            share, left = cost / left, left - cost
            finish = time.perf_counter() + (end - time.perf_counter()) * share
            memory = measure_memory(chain, x)
            if beside:
                self._whole(x)
            repeats = Repeats(slice_s=finish - time.perf_counter(), least=_LEAST, most=_MOST)
            with quiet():
                while repeats.again([[lap.seconds for lap in laps], *([whole] if beside else [])]):
                    laps.append(chain.lap(x, self.clock))
                    chain.clear()
                    if beside:
                        whole.append(self._whole(x))
            self.measured[degree] = (size, min(lap.seconds for lap in laps))
            self._record(size, degree, laps, memory)
            if beside:
                self.measured[WHOLE] = (size, min(whole))
                self._check(size, whole)
            if degree == 1 and size == self.global_batch:
                self.sweep.host_share = min(lap.host_s / max(lap.seconds, 1e-12) for lap in laps)

    def _check(self, size: int, whole: Sequence[float]) -> None:
        parts = [t for t in self.sweep.timings if t.microbatch == size and t.tensor_degree == 1]
        total = sum(t.forward.median + t.backward.median for t in parts)
        self.sweep.whole.append(WholeStep(microbatch=size, whole=Stat.of(whole), components_s=total))

    def _whole(self, x: Tensor) -> float:
        chain = self.subject.chains[1]
        return whole_step(self.subject.model, x, self.clock, chain.device, chain.precision)

    def _record(self, size: int, degree: int, laps: Sequence[Lap], memory: StepMemory) -> None:
        # Interruptions are rare in any one component and common in a lap: medians of components fall short of the
        # median lap by what is nobody's own. Each carries its part of that.
        forward = [Stat.of(times) for times in zip(*(lap.forward for lap in laps), strict=True)]
        backward = [Stat.of(times) for times in zip(*(lap.backward for lap in laps), strict=True)]
        parts = sum(stat.median for stat in (*forward, *backward))
        factor = Stat.of(lap.seconds for lap in laps).median / parts if parts else 1.0
        for i, name in enumerate(self.subject.names):
            if name in self.subject.split[degree]:
                self.sweep.timings.append(
                    Timing(
                        component=name,
                        microbatch=size,
                        tensor_degree=degree,
                        forward=scaled(forward[i], factor),
                        backward=scaled(backward[i], factor),
                        saved_bytes=memory.components[i].saved,
                        transient_bytes=memory.components[i].transient,
                    )
                )

    def _leave_out(self, what: str) -> None:
        if what not in self.sweep.skipped:
            self.sweep.skipped.append(what)


def degrees_up_to(largest: int, splittable: Iterable[int]) -> list[int]:
    """1, 2, 4, ... as far as ``largest`` and the most divisible component (its ``max_degree``) allow."""
    limit = min(largest, max(splittable, default=1))
    return [1 << k for k in range(limit.bit_length()) if 1 << k <= limit] or [1]
