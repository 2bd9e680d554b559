"""Compute time of a component at any microbatch and tensor degree, from the times a profile holds.

Time is affine in samples *between neighbouring measurements* and along the outermost pair beyond them: small
microbatches are launch-bound and large ones are not, so one measurement is never scaled linearly. Below the smallest
microbatch at which a tensor degree was measured, it falls as the whole component does. A tensor degree that was not
measured lies between its neighbours by the share of FLOPs it computes. Nothing is faster than the dispatch floor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asa.cost.constants import constant
from asa.ir.codec import noun
from asa.ir.graph import Component
from asa.ir.plan import OptimizerName
from asa.ir.profile import Profile, Stat, Timing

PASSES: dict[str, float] = {"sgd": 5.0, "adamw": 7.0}
"""Memory passes over parameters of one optimizer step: reads and writes of parameter, gradient and state."""
_ADDING_PASSES = 3.0
"""Memory passes of adding a microbatch's gradients to those of the ones before: two are read, their sum is written."""

_NORMAL_P90 = 1.2816


def adding(update_s: Any, optimizer: OptimizerName, num_microbatches: int) -> Any:
    """Seconds to add up gradients of what takes ``update_s`` to update (numbers or arrays), in the mean of a step's
    microbatches: those of the first are taken as they are."""
    return update_s * (_ADDING_PASSES / PASSES[optimizer] * (1 - 1 / num_microbatches))


def deviation(stat: Stat) -> float:
    """Standard deviation of one observation, taking p10..p90 for a normal's. Seconds."""
    return (stat.p90 - stat.p10) / (2 * _NORMAL_P90)


def standard_error(stat: Stat) -> float:
    """Standard error of the median over ``n`` observations (1.2533 times that of a normal's mean). Seconds."""
    return 1.2533 * deviation(stat) / math.sqrt(stat.n)


def _line(xs: list[float], ys: list[float], x: float) -> float:
    """Piecewise affine through (xs, ys); beyond the ends along the outermost pair, never falling beyond the last."""
    if len(xs) == 1:
        return ys[0]
    at = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    if x > xs[-1]:
        return ys[-1] + max(0.0, slope) * (x - xs[-1])
    return ys[at - 1] + slope * (x - xs[at - 1])


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0


@noun
class Work:
    """One microbatch of one component on one rank. Seconds and bytes; the errors are standard errors in seconds."""

    forward_s: float
    backward_s: float
    error_s: float
    deviation_s: float
    saved_bytes: float
    transient_bytes: float
    unmade_bytes: float = 0.0


class Grid:
    """What was measured of one component at one tensor degree, by microbatch: medians in seconds, bytes."""

    def __init__(self, timings: list[Timing]) -> None:
        self.timings = timings
        self.xs = [float(t.microbatch) for t in timings]
        self.forward = [t.forward.median for t in timings]
        self.backward = [t.backward.median for t in timings]
        self.saved = [float(t.saved_bytes) for t in timings]
        self.transient = [float(t.transient_bytes) for t in timings]
        self.unmade = [float(t.unmade_bytes) for t in timings]
        self._errors: dict[int, tuple[float, float]] = {}

    def nearest(self, samples: int) -> int:
        """The entry whose microbatch is closest in proportion, the smaller one of two."""
        at = bisect_left(self.xs, samples)
        among = range(max(0, at - 1), min(at + 1, len(self.xs)))
        return min(among, key=lambda k: abs(math.log(self.timings[k].microbatch / samples)))

    def errors(self, k: int) -> tuple[float, float]:
        """Standard error and deviation of forward and backward of entry ``k``. Seconds."""
        if k not in self._errors:
            t = self.timings[k]
            self._errors[k] = (
                math.hypot(standard_error(t.forward), standard_error(t.backward)),
                math.hypot(deviation(t.forward), deviation(t.backward)),
            )
        return self._errors[k]


class Times:
    """A profile's timings, indexed. ``flops_share(component, degree)`` is what the busiest tensor rank computes."""

    def __init__(self, profile: Profile, flops_share: Callable[[Component, int], float]) -> None:
        self.floor = profile.dispatch_floor_s
        self.unmade = any(t.unmade_bytes for t in profile.timings)
        self.share = flops_share
        self._timings: dict[tuple[str, int], list[Timing]] = defaultdict(list)
        for timing in profile.timings:
            self._timings[timing.component, timing.tensor_degree].append(timing)
        for found in self._timings.values():
            found.sort(key=lambda t: t.microbatch)
        self._grids: dict[tuple[str, int], Grid] = {}
        self._known: dict[tuple[str, int, int, bool], Work] = {}
        by_tokens: dict[tuple[str, int], list[Timing]] = defaultdict(list)
        for timing in sorted(profile.by_tokens or (), key=lambda t: t.microbatch):
            by_tokens[timing.component, timing.tensor_degree].append(timing)
        self._token_grids = {key: Grid(found) for key, found in by_tokens.items()}
        self._degrees: dict[str, list[int]] = defaultdict(list)
        for name, degree in sorted(self._timings):
            self._degrees[name].append(degree)
        self._ratios: dict[int, float] = {}
        self._updates: dict[tuple[str, int, str], Stat] = {
            (u.component, u.tensor_degree, u.optimizer): u.step for u in profile.updates
        }
        self._update_degrees: dict[tuple[str, str], list[int]] = defaultdict(list)
        for name, degree, optimizer in self._updates:
            self._update_degrees[name, optimizer].append(degree)
        whole = sorted(profile.whole, key=lambda w: w.microbatch)
        self._whole_at = [math.log(w.microbatch) for w in whole]
        self._whole_ratio = [w.whole.median / w.components_s for w in whole if w.components_s > 0]

    def degrees(self, name: str) -> list[int]:
        """Tensor degrees at which a component was measured, rising."""
        return self._degrees[name]

    def launch(self, component: Component) -> float:
        """Seconds of the host of a device apart to launch a forward of the component, however small it is."""
        return max(self.floor, constant("estimate_launch_cuda_s") * len(component.modules))

    def signature(self, component: Component) -> tuple[object, ...]:
        """What two components have in common that always take as long as each other."""
        name, tokens = component.name, self._token_grids
        grids = [self.grid(name, d) for d in self._degrees[name]]
        grids += [tokens[key] for key in sorted(tokens) if key[0] == name]
        times = [(tuple(g.xs), tuple(g.forward), tuple(g.backward)) for g in grids]
        return (self.launch(component), *self._degrees[name], *times)

    def grid(self, name: str, degree: int) -> Grid:
        """What was measured of a component at a tensor degree."""
        if (name, degree) not in self._grids:
            self._grids[name, degree] = Grid(self._timings[name, degree])
        return self._grids[name, degree]

    def work(self, component: Component, samples: int, degree: int, *, by_tokens: bool = False) -> Work:
        """Forward and backward of ``samples`` samples at a tensor degree, alone on the device. ``by_tokens``: of a
        shard whose tokens are cut, too; as one whose are not where that was not measured. Bytes are always the
        latter's."""
        key = (component.name, samples, degree, by_tokens)
        if key not in self._known:
            found = self._work(component, samples, degree)
            if by_tokens and (component.name, degree) in self._token_grids:
                timed = self._at(self._token_grids[component.name, degree], samples)
                found = replace(
                    timed, saved_bytes=found.saved_bytes, transient_bytes=found.transient_bytes,
                    unmade_bytes=found.unmade_bytes,
                )  # fmt: skip
            self._known[key] = found
        return self._known[key]

    def by_tokens(self, degree: int) -> list[str]:
        """Components that were measured at a tensor degree with their tokens cut."""
        return [name for name, measured in self._token_grids if measured == degree]

    def _work(self, component: Component, samples: int, degree: int) -> Work:
        degrees = self._degrees[component.name]
        if degree in degrees:
            return self._measured(component.name, samples, degree)
        at = bisect_left(degrees, degree)
        low = self._measured(component.name, samples, degrees[max(0, at - 1)])
        share = self.share(component, degree)
        first = self.share(component, degrees[max(0, at - 1)])
        if at < len(degrees):
            high = self._measured(component.name, samples, degrees[at])
            last = self.share(component, degrees[at])
            mix = (first - share) / (first - last) if first > last else 0.0
        else:
            # Beyond the highest degree measured, what exceeds the floor shrinks with the share.
            floor = self.floor
            high = Work(
                forward_s=floor, backward_s=floor, error_s=low.error_s, deviation_s=low.deviation_s, saved_bytes=0.0,
                transient_bytes=0.0,
            )  # fmt: skip
            mix = 1 - share / first if first > 0 else 0.0
        mix = min(1.0, max(0.0, mix))

        def between(field: str) -> float:
            a, b = getattr(low, field), getattr(high, field)
            return float(max(0.0, a + mix * (b - a)))

        return Work(
            forward_s=max(self.floor, between("forward_s")),
            backward_s=max(self.floor, between("backward_s")),
            error_s=between("error_s"),
            deviation_s=between("deviation_s"),
            saved_bytes=between("saved_bytes"),
            transient_bytes=between("transient_bytes"),
            unmade_bytes=between("unmade_bytes"),
        )

    def _measured(self, name: str, samples: int, degree: int) -> Work:
        found = self._at(self.grid(name, degree), samples)
        least = self.grid(name, degree).xs[0]
        if samples >= least or not self.reaches_below(name, degree):
            return found
        edge = self._at(self.grid(name, degree), int(least))
        small, large = self._measured(name, samples, 1), self._measured(name, int(least), 1)
        if len(self.grid(name, degree).xs) == 1:
            # What does not depend on samples is not to be seen from one point; of what is transient a rank may have
            # less than its part at large microbatches only, where the peak is another moment.
            passing = edge.transient_bytes * _ratio(small.transient_bytes, large.transient_bytes)
            found = replace(
                found,
                saved_bytes=edge.saved_bytes * _ratio(small.saved_bytes, large.saved_bytes),
                transient_bytes=max(passing, small.transient_bytes / degree),
                unmade_bytes=edge.unmade_bytes * _ratio(small.unmade_bytes, large.unmade_bytes),
            )
        return replace(
            found,
            forward_s=max(self.floor, edge.forward_s * _ratio(small.forward_s, large.forward_s)),
            backward_s=max(self.floor, edge.backward_s * _ratio(small.backward_s, large.backward_s)),
        )

    def reaches_below(self, name: str, degree: int) -> bool:
        """Whether the whole component was measured at smaller microbatches than a tensor degree of it."""
        whole = 1 in self._degrees[name]
        return degree > 1 and whole and self.grid(name, 1).xs[0] < self.grid(name, degree).xs[0]

    def _at(self, found: Grid, samples: int) -> Work:
        xs, floor = found.xs, self.floor

        def time(ys: list[float]) -> float:
            if len(xs) == 1:  # One point fixes only what lies above the floor.
                least = min(floor, ys[0])
                return least + (ys[0] - least) * samples / xs[0]
            return max(floor, _line(xs, ys, samples))

        def size(ys: list[float]) -> float:
            return ys[0] * samples / xs[0] if len(xs) == 1 else max(0.0, _line(xs, ys, samples))

        nearest = found.nearest(samples)
        error, spread = found.errors(nearest)
        scale = max(0.0, samples / xs[nearest]) if len(xs) == 1 or samples > xs[-1] else 1.0
        return Work(
            forward_s=time(found.forward),
            backward_s=time(found.backward),
            error_s=scale * error,
            deviation_s=scale * spread,
            saved_bytes=size(found.saved),
            transient_bytes=size(found.transient),
            unmade_bytes=min(size(found.unmade), max(found.unmade)),
        )

    def whole_ratio(self, samples: int) -> float:
        """Whole step over the sum of components, as measured at the nearest microbatches (1 where it was not).

        Held within 10 % of 1: a profile that is further off is not one that a factor could mend.
        """
        if not self._whole_ratio or len(self._whole_ratio) != len(self._whole_at):
            return 1.0
        if samples not in self._ratios:
            x = min(max(math.log(samples), self._whole_at[0]), self._whole_at[-1])
            self._ratios[samples] = min(1.1, max(1 / 1.1, _line(self._whole_at, self._whole_ratio, x)))
        return self._ratios[samples]

    def update(
        self, component: Component, degree: int, optimizer: OptimizerName, parameter_bytes: float, bandwidth: float
    ) -> float:
        """Seconds of the optimizer step, a fused kernel, on ``parameter_bytes`` of the component.

        From the timing at that tensor degree, else at the nearest one in proportion to bytes, else of another
        optimizer in proportion to memory passes, else from memory ``bandwidth`` in bytes/s.
        """
        if parameter_bytes <= 0:
            return 0.0
        exact = self._updates.get((component.name, degree, optimizer))
        if exact is not None:
            return exact.median
        for other in (optimizer, *sorted(PASSES)):
            known = [
                (abs(math.log(t / degree)), t, s)
                for t in self._update_degrees.get((component.name, other), ())
                for s in (self._updates[component.name, t, other],)
            ]
            if known:
                _, at, step = min(known, key=lambda k: k[:2])
                full = self._share_of_bytes(component, at)
                return step.median * parameter_bytes / full * PASSES[optimizer] / PASSES[other]
        efficient = bandwidth * constant("estimate_update_bandwidth_efficiency")
        return PASSES[optimizer] * parameter_bytes / (efficient or constant("fallback_memory_bandwidth"))

    @staticmethod
    def _share_of_bytes(component: Component, degree: int) -> float:
        split = component.split
        divisible = 0.0 if split is None else float(split.parameter_bytes)
        return max(1.0, component.parameter_bytes - divisible * (1 - 1 / degree))
