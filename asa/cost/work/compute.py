"""Compute time of a component at any microbatch and tensor degree, from the times in a profile.

Time is affine in samples *between neighbouring measurements*, and extrapolated from the two outermost ones: small
microbatches are launch-bound and large ones are not, so one measurement is never scaled linearly. Below the smallest
microbatch measured at a tensor degree, time falls in proportion to that of the unsplit component. A tensor degree that
was not measured is interpolated by its share of FLOPs. Nothing is faster than the dispatch floor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.graph import Component, firsts
from asa.ir.plan import OptimizerName
from asa.ir.profile import Profile, Stat, Timing

PASSES: dict[str, float] = {"sgd": 5.0, "adamw": 7.0}
"""Memory passes over parameters of one optimizer step: reads and writes of parameter, gradient and state."""
_ADDING_PASSES = 3.0
"""Memory passes to accumulate a microbatch's gradients: two reads, one write."""

_NORMAL_P90 = 1.2816


def adding(update_s: Any, optimizer: OptimizerName, num_microbatches: int) -> Any:
    """Seconds per microbatch to accumulate the gradients of parameters whose update takes ``update_s`` (a number or an
    array), averaged over a step; the first microbatch has nothing to add to."""
    return update_s * (_ADDING_PASSES / PASSES[optimizer] * (1 - 1 / num_microbatches))


def host_update(cluster: Cluster, optimizer: OptimizerName, updated_bytes: Any, busy: int) -> Any:
    """Seconds to update ``updated_bytes`` of a device's parameters (a number or an array) on its host, while ``busy``
    devices do the same.

    Gradients are copied to the host, the host updates, and parameters are copied back, one after the other
    (:mod:`asa.executor.model.offload`). The devices of a host share its memory bandwidth; each has its own link. Ren et
    al. 2021, "ZeRO-Offload".
    """
    link = cluster.device.host_bandwidth or constant("fallback_host_bandwidth")
    neighbours = max(1, min(busy, cluster.host))
    arithmetic = PASSES[optimizer] * updated_bytes * neighbours / constant("host_update_bandwidth")
    return 2 * updated_bytes / link + arithmetic


def deviation(stat: Stat) -> float:
    """Standard deviation of one observation in seconds, from p10 and p90 of a normal distribution."""
    return (stat.p90 - stat.p10) / (2 * _NORMAL_P90)


def standard_error(stat: Stat) -> float:
    """Standard error of the median of ``n`` observations in seconds: sqrt(pi / 2) times that of a normal's mean."""
    return 1.2533 * deviation(stat) / math.sqrt(stat.n)


def _line(xs: Any, ys: Any, x: Any) -> Any:
    """Values at all of ``x``, piecewise affine through (xs, ys), and extrapolated from the two outermost points; above
    the last point they never fall. The last axis of ``ys`` is that of ``xs``, and that of the values is that of
    ``x``."""
    if len(xs) == 1:
        return np.repeat(ys, len(x), axis=-1)
    at = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
    slope = (ys[..., at] - ys[..., at - 1]) / (xs[at] - xs[at - 1])
    beyond = ys[..., -1:] + np.maximum(0.0, slope) * (x - xs[-1])
    return np.where(x > xs[-1], beyond, ys[..., at - 1] + slope * (x - xs[at - 1]))


def _ratio(small: Any, large: Any) -> Any:
    return np.divide(small, large, out=np.ones_like(small), where=large > 0)


@noun
class Work:
    """One microbatch of one component on one rank: seconds and bytes. ``error_s``: standard error of the time of both
    passes; ``spared_s``: what a second forward takes less; ``unmade_bytes``: gradients that do not exist yet at the
    peak of backward."""

    forward_s: float
    backward_s: float
    error_s: float
    spared_s: float
    saved_bytes: float
    transient_bytes: float
    unmade_bytes: float = 0.0

    @property
    def again_s(self) -> float:
        """Seconds of a second forward, which recomputes what backward needs."""
        return self.forward_s - self.spared_s


_QUANTITIES = tuple(f.name for f in fields(Work))
_SECONDS, _ERROR, _AMOUNTS = slice(0, 2), 2, slice(3, 7)
"""Rows of arrays with a row for each field of :class:`Work`: passes, their error, and what may be 0."""
_POINTS = 192
"""Numbers of samples among which those are that take least."""
_SPARED, _SAVED, _TRANSIENT, _UNMADE = map(
    _QUANTITIES.index, ("spared_s", "saved_bytes", "transient_bytes", "unmade_bytes")
)


class Grid:
    """Measurements at one tensor degree of components that were measured at the same microbatches ``xs``. ``timings``
    has a list for each component."""

    def __init__(self, timings: Sequence[list[Timing]]) -> None:
        self._timings = timings
        self.xs = np.array([float(t.microbatch) for t in timings[0]])
        measured = [[_figures(t) for t in own] for own in timings]
        self._times, self._sizes = np.split(np.array(measured, dtype=float).transpose(2, 0, 1), [2])
        self._errors: dict[int, Any] = {}

    def at(self, samples: Any, floor: float) -> Any:
        """The :class:`Work` of each number of ``samples``: shape (field, component, number). With a single measurement,
        only the time above the ``floor`` scales with samples."""
        xs, times, sizes = self.xs, _line(self.xs, self._times, samples), _line(self.xs, self._sizes, samples)
        found = np.empty((len(_QUANTITIES), *times.shape[1:]))
        if len(xs) == 1:
            least = np.minimum(floor, times)
            found[_SECONDS], found[_AMOUNTS] = least + (times - least) * samples / xs[0], sizes * samples / xs[0]
        else:
            found[_SECONDS], found[_AMOUNTS] = np.maximum(floor, times), np.maximum(0.0, sizes)
        found[_UNMADE] = np.minimum(found[_UNMADE], self._sizes[-1].max(axis=-1, keepdims=True))
        # The measured microbatch with the smallest ratio to the samples; of two, the smaller one.
        nearest = np.abs(np.log(xs[:, None] / samples)).argmin(axis=0)
        scale = np.where((len(xs) == 1) | (samples > xs[-1]), samples / xs[nearest], 1.0)
        found[_ERROR] = scale * np.stack([self._error(k) for k in nearest.tolist()], axis=1)
        return found

    def _error(self, k: int) -> Any:
        """For each component, the standard error of forward plus backward at measurement ``k``, in seconds."""
        if k not in self._errors:
            both = [(own[k].forward, own[k].backward) for own in self._timings]
            self._errors[k] = np.array([math.hypot(*map(standard_error, x)) for x in both])
        return self._errors[k]


def _figures(t: Timing) -> tuple[float, ...]:
    return (t.forward.median, t.backward.median, t.spared_s, t.saved_bytes, t.transient_bytes, t.unmade_bytes)


@dataclass
class _Alike:
    """Indices of components measured at the same tensor degrees and microbatches, and measurements for each degree."""

    index: Any
    degrees: list[int]
    grids: dict[int, Grid]

    def reaches_below(self, degree: int) -> bool:
        """Whether the unsplit components were measured at smaller microbatches than tensor degree ``degree``."""
        return degree > 1 and 1 in self.grids and self.grids[1].xs[0] < self.grids[degree].xs[0]


class Times:
    """Times and bytes of all components of a profile at any microbatch and tensor degree.

    ``flops_share(component, degree)``: share of the component's FLOPs on the tensor rank that has most. Arrays have a
    column for each component.
    """

    def __init__(self, profile: Profile, flops_share: Callable[[Component, int], float]) -> None:
        self.floor = profile.dispatch_floor_s
        self.unmade = any(t.unmade_bytes for t in profile.timings)
        self._components, self.like = profile.graph.components, profile.graph.like
        self._positions = {c.name: i for i, c in enumerate(self._components)}
        self._flops_share = flops_share
        self._shares: dict[int, Any] = {}
        self._timings, self._token_timings = _indexed(profile.timings), _indexed(profile.by_tokens or ())
        self._token_groups = self._by_tokens()
        self._by_token: dict[tuple[int, int], Any] = {}
        self._groups = self._alike()
        self._arrays: dict[tuple[int, int], Any] = {}
        self._works: dict[tuple[str, int, int, bool], Work] = {}
        self._ratios: dict[int, float] = {}
        self._updates: dict[tuple[str, int, str], Stat] = {
            (u.component, u.tensor_degree, u.optimizer): u.step for u in profile.updates
        }
        self._update_degrees: dict[tuple[str, str], list[int]] = defaultdict(list)
        for name, degree, optimizer in self._updates:
            self._update_degrees[name, optimizer].append(degree)
        self._most_ratio = {"none": 1.1, "whole": math.inf}.get(profile.compiled, 1.0)
        whole = sorted(profile.whole, key=lambda w: w.microbatch)
        self._whole_at = [math.log(w.microbatch) for w in whole]
        self._whole_ratio = [w.whole.median / w.components_s for w in whole if w.components_s > 0]

    def _alike(self) -> list[_Alike]:
        measured: dict[str, list[int]] = defaultdict(list)
        for name, degree in sorted(self._timings):
            measured[name].append(degree)
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, c in enumerate(self._components):
            degrees = measured[c.name]
            groups[tuple((d, *(t.microbatch for t in self._timings[c.name, d])) for d in degrees)].append(i)
        alike = []
        for index in groups.values():
            names = [self._components[i].name for i in index]
            degrees = measured[names[0]]
            grids = {d: Grid([self._timings[n, d] for n in names]) for d in degrees}
            alike.append(_Alike(np.array(index), degrees, grids))
        return alike

    def _by_tokens(self) -> dict[int, list[tuple[Any, Grid]]]:
        """By tensor degree, components measured with sequence parallelism at the same microbatches."""
        groups: dict[tuple[int, tuple[int, ...]], list[str]] = defaultdict(list)
        for (name, degree), timings in self._token_timings.items():
            groups[degree, tuple(t.microbatch for t in timings)].append(name)
        grids: dict[int, list[tuple[Any, Grid]]] = defaultdict(list)
        for (degree, _), names in groups.items():
            grid = Grid([self._token_timings[n, degree] for n in names])
            grids[degree].append((np.array([self._positions[n] for n in names]), grid))
        return grids

    @cached_property
    def launches(self) -> Any:
        """Seconds that the host of an asynchronous device takes to launch a forward of each component: an array."""
        each = constant("estimate_launch_cuda_s")
        return np.array([max(self.floor, each * len(c.modules)) for c in self._components])

    @cached_property
    def timed(self) -> tuple[int, ...]:
        """For each component, the index of the first one that differs from it only in its names and was measured alike
        in all respects."""
        known = defaultdict[str, list[object]](list)
        for number, timings in enumerate((self._timings, self._token_timings)):
            for name, k in sorted(timings):
                rows = ((t.microbatch, t.forward, t.backward, *_figures(t)[2:]) for t in timings[name, k])
                known[name].append((number, k, *rows))
        for name, degree, optimizer in sorted(self._updates):
            known[name].append((degree, optimizer, self._updates[name, degree, optimizer]))
        each = zip(self.like, self._components, strict=True)
        return firsts((k, len(c.modules), *known[c.name]) for k, c in each)

    def work(self, component: Component, samples: int, degree: int, *, by_tokens: bool = False) -> Work:
        """Forward and backward of ``samples`` samples at tensor degree ``degree``, on an otherwise idle device.
        ``by_tokens``: with sequence parallelism; if that was not measured, times are those without. Bytes are always
        those without sequence parallelism."""
        key = (component.name, samples, degree, by_tokens)
        if key not in self._works:
            column = self.every(samples, degree, by_tokens=by_tokens)[:, self._positions[component.name]]
            self._works[key] = Work(**dict(zip(_QUANTITIES, column.tolist(), strict=True)))
        return self._works[key]

    def every(self, samples: int, degree: int, *, by_tokens: bool = False) -> Any:
        """The :meth:`work` of all components: shape (field, component). Components that cannot be split are whole."""
        key = (samples, degree)
        if key not in self._arrays:
            self.prepare([samples], degree)
        if not by_tokens:
            return self._arrays[key]
        if key not in self._by_token:
            by_token = self._by_token[key] = self._arrays[key].copy()
            for at, grid in self._token_groups.get(degree, ()):
                by_token[: _SPARED + 1, at] = grid.at(np.array([samples]), self.floor)[: _SPARED + 1, :, 0]
            by_token[_SPARED] = np.minimum(by_token[_SPARED], np.maximum(0.0, by_token[0] - self.floor))
        return self._by_token[key]

    def prepare(self, samples: Iterable[int], degree: int) -> None:
        """Compute :meth:`every` for many numbers of samples at once."""
        missing = [n for n in samples if (n, degree) not in self._arrays]
        figures = np.empty((len(missing), len(_QUANTITIES), len(self._components)))
        for group in self._groups if missing else ():
            figures[..., group.index] = np.moveaxis(self._between(group, np.array(missing), degree), -1, 0)
        figures[:, _SPARED] = np.minimum(figures[:, _SPARED], np.maximum(0.0, figures[:, 0] - self.floor))
        figures.flags.writeable = False
        self._arrays.update(((n, degree), x) for n, x in zip(missing, figures, strict=True))

    def passes(self, samples: int, degree: int, *, by_tokens: bool = False) -> Any:
        """Seconds of forward and of backward: shape (pass, component)."""
        return self.every(samples, degree, by_tokens=by_tokens)[_SECONDS]

    def again(self, samples: int, degree: int, *, by_tokens: bool = False) -> Any:
        """Seconds of a second forward, for each component."""
        figures = self.every(samples, degree, by_tokens=by_tokens)
        return figures[0] - figures[_SPARED]

    def both(self, samples: int, degree: int) -> Any:
        """Seconds of forward plus backward, for each component."""
        forward, backward = self.passes(samples, degree)
        return forward + backward

    def sizes(self, samples: int, degree: int) -> Any:
        """Bytes saved for backward, and transient bytes in it: shape (2, component)."""
        return self.every(samples, degree)[_SAVED:_UNMADE]

    def least(self, samples: int, degree: int) -> Any:
        """For each component, the seconds of :meth:`both`, or those with sequence parallelism if they are fewer."""
        return np.minimum(self.both(samples, degree), self.passes(samples, degree, by_tokens=True).sum(axis=0))

    def _between(self, x: _Alike, samples: Any, degree: int) -> Any:
        if degree in x.grids:
            return self._measured(x, samples, degree)
        at = bisect_left(x.degrees, degree)
        below = x.degrees[max(0, at - 1)]
        low, share, first = self._measured(x, samples, below), self._share(x, degree), self._share(x, below)
        with np.errstate(divide="ignore", invalid="ignore"):
            if at < len(x.degrees):
                high, last = self._measured(x, samples, x.degrees[at]), self._share(x, x.degrees[at])
                mix = np.where(first > last, (first - share) / (first - last), 0.0)
            else:  # Above the highest measured degree, time above the floor shrinks with the share of FLOPs.
                high = low.copy()
                high[_SECONDS], high[_AMOUNTS] = self.floor, 0.0
                mix = np.where(first > 0, 1 - share / first, 0.0)
        figures = np.maximum(0.0, low + np.minimum(1.0, np.maximum(0.0, mix))[:, None] * (high - low))
        figures[_SECONDS] = np.maximum(self.floor, figures[_SECONDS])
        return figures

    def _measured(self, x: _Alike, samples: Any, degree: int) -> Any:
        grid = x.grids[degree]
        figures, smallest = grid.at(samples, self.floor), grid.xs[:1]
        too_small = samples < smallest
        if not too_small.any() or not x.reaches_below(degree):
            return figures
        small, large = self._measured(x, samples[too_small], 1), self._measured(x, smallest, 1)
        falls = grid.at(smallest, self.floor) * _ratio(small, large)
        if len(grid.xs) == 1:
            # A single measurement does not show which bytes are independent of samples. A rank's transient bytes are
            # below its share of the unsplit ones only at large microbatches, where the peak occurs at another time.
            falls[_TRANSIENT] = np.maximum(falls[_TRANSIENT], small[_TRANSIENT] / degree)
            figures[_AMOUNTS, :, too_small] = falls[_AMOUNTS]
        figures[_SECONDS, :, too_small] = np.maximum(self.floor, falls[_SECONDS])
        return figures

    def _share(self, x: _Alike, degree: int) -> Any:
        if degree not in self._shares:
            shares = [1.0 if c.split is None else self._flops_share(c, degree) for c in self._components]
            self._shares[degree] = np.array(shares)
        return self._shares[degree][x.index]

    def whole_ratio(self, samples: int) -> float:
        """The ratio of a whole step's time to the sum over its components, interpolated between the measured
        microbatches; 1 if it was not measured, or if compiled components run one by one. Without the compiler it is
        limited to 10 % around 1: a factor cannot correct a profile that is further off."""
        if not self._whole_ratio or len(self._whole_ratio) != len(self._whole_at):
            return 1.0
        if samples not in self._ratios:
            x = min(max(math.log(samples), self._whole_at[0]), self._whole_at[-1])
            ratio = float(_line(np.array(self._whole_at), np.array(self._whole_ratio), np.array([x]))[0])
            self._ratios[samples] = min(self._most_ratio, max(1 / self._most_ratio, ratio))
        return self._ratios[samples]

    def update(
        self, component: Component, degree: int, optimizer: OptimizerName, parameter_bytes: float, bandwidth: float
    ) -> float:
        """Seconds of the optimizer step, a fused kernel, on ``parameter_bytes`` of the component.

        The source is the first that exists: the timing at this tensor degree; that at the nearest degree, scaled by
        bytes; that of another optimizer, also scaled by memory passes; the memory ``bandwidth`` in bytes/s.
        """
        if parameter_bytes <= 0:
            return 0.0
        exact = self._updates.get((component.name, degree, optimizer))
        if exact is not None:
            return exact.median
        for source in (optimizer, *sorted(PASSES)):
            timings = [
                (abs(math.log(t / degree)), t, s)
                for t in self._update_degrees.get((component.name, source), ())
                for s in (self._updates[component.name, t, source],)
            ]
            if timings:
                _, at, step = min(timings, key=lambda k: k[:2])
                share_bytes = self._share_of_bytes(component, at)
                return step.median * parameter_bytes / share_bytes * PASSES[optimizer] / PASSES[source]
        efficient = bandwidth * constant("estimate_update_bandwidth_efficiency")
        return PASSES[optimizer] * parameter_bytes / (efficient or constant("fallback_memory_bandwidth"))

    @staticmethod
    def _share_of_bytes(component: Component, degree: int) -> float:
        split = component.split
        divisible = 0.0 if split is None else float(split.parameter_bytes)
        return max(1.0, component.parameter_bytes - divisible * (1 - 1 / degree))


def _indexed(timings: Iterable[Timing]) -> dict[tuple[str, int], list[Timing]]:
    """Timings by component and tensor degree, in rising order of microbatches."""
    by_key: dict[tuple[str, int], list[Timing]] = defaultdict(list)
    for timing in sorted(timings, key=lambda t: t.microbatch):
        by_key[timing.component, timing.tensor_degree].append(timing)
    return by_key


class LeastTimes(Times):
    """The least of ``times`` and bytes that so many samples or more take, up to ``most``: they never fall where samples
    grow. Ratios of whole steps are in them."""

    def __init__(self, times: Times, most: int) -> None:
        vars(self).update(vars(times))
        self._of, self._arrays, self._works, self._by_token = times, {}, {}, {}
        measured = {t.microbatch for row in times._timings.values() for t in row}
        spread = np.geomspace(1, max(1, most), _POINTS).astype(np.int64).tolist()
        self._sizes = np.array(sorted({*spread, *(x for x in measured if x <= most)}))
        self._later: dict[tuple[int, bool], Any] = {}

    def whole_ratio(self, samples: int) -> float:
        """1: times have the ratio."""
        return 1.0

    def every(self, samples: int, degree: int, *, by_tokens: bool = False) -> Any:
        """The least :meth:`work` of all components; as :meth:`Times.every`."""
        known = self._by_token if by_tokens else self._arrays
        if (samples, degree) not in known:
            later, at = self._from(degree, by_tokens), int(np.searchsorted(self._sizes, samples))
            figures = self._at(samples, degree, by_tokens)
            figures = np.minimum(figures, later[at]) if at < len(later) else figures
            figures[_SPARED] = figures[0] - figures[_SPARED]
            figures[_UNMADE] *= -1
            known[samples, degree] = figures
        return known[samples, degree]

    def prepare(self, samples: Iterable[int], degree: int) -> None:
        """Compute :meth:`every` for many numbers of samples at once."""
        self._of.prepare(samples, degree)

    def _at(self, samples: int, degree: int, by_tokens: bool) -> Any:
        """The figures of so many samples: in place of what a second forward takes less, its time; and less memory where
        more of the gradients do not exist yet."""
        figures = self._of.every(samples, degree, by_tokens=by_tokens).copy()
        figures[_SPARED] = figures[0] - figures[_SPARED]
        figures[_UNMADE] *= -1
        figures[[0, 1, _SPARED]] *= self._of.whole_ratio(samples)
        return figures

    def _from(self, degree: int, by_tokens: bool) -> Any:
        """The least figures of each number of ``_sizes`` samples or more."""
        if (degree, by_tokens) not in self._later:
            self._of.prepare(self._sizes.tolist(), degree)
            figures = np.stack([self._at(n, degree, by_tokens) for n in self._sizes.tolist()])
            self._later[degree, by_tokens] = np.minimum.accumulate(figures[::-1])[::-1]
        return self._later[degree, by_tokens]
