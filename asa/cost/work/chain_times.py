"""Times and activations of all components of a graph at once: what :class:`asa.cost.work.compute.Times` says of each,
as arrays.

Components that were measured at the same tensor degrees and microbatches are looked up together. The formulas are
those of :mod:`asa.cost.work.compute`, in the same order, so that the figures are the same to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.work.compute import Times
from asa.ir.graph import Component


@dataclass
class _Alike:
    """Components (by index) measured alike. By tensor degree ``xs``: microbatches, ``times``: medians forward and
    backward, ``sizes``: bytes saved and transient; pass x component x microbatch. ``below``: as
    :meth:`asa.cost.work.compute.Times.reaches_below`."""

    index: Any
    degrees: list[int]
    xs: dict[int, list[float]]
    times: dict[int, Any]
    sizes: dict[int, Any]
    below: dict[int, bool]


class ChainTimes:
    """Forward and backward of every component of a chain."""

    def __init__(self, times: Times, components: Sequence[Component]) -> None:
        self._times, self._components = times, components
        self._shares: dict[int, Any] = {}
        self._places = {c.name: i for i, c in enumerate(components)}
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, c in enumerate(components):
            degrees = tuple(times.degrees(c.name))
            key = (degrees, *(tuple(times.grid(c.name, d).xs) for d in degrees))
            groups.setdefault(key, []).append(i)
        self._groups = [self._alike(index) for index in groups.values()]

    def _alike(self, index: list[int]) -> _Alike:
        names = [self._components[i].name for i in index]
        degrees = self._times.degrees(names[0])
        grids = {d: [self._times.grid(n, d) for n in names] for d in degrees}
        return _Alike(
            index=np.array(index),
            degrees=degrees,
            xs={d: grids[d][0].xs for d in degrees},
            times={d: np.array([[g.forward for g in grids[d]], [g.backward for g in grids[d]]]) for d in degrees},
            sizes={d: np.array([[g.saved for g in grids[d]], [g.transient for g in grids[d]]]) for d in degrees},
            below={d: self._times.reaches_below(names[0], d) for d in degrees},
        )

    def launch(self, component: Component) -> float:
        """:meth:`asa.cost.work.compute.Times.launch`."""
        return self._times.launch(component)

    def both(self, samples: int, degree: int) -> Any:
        """Seconds of forward and backward of ``samples`` samples at a tensor degree, per component; what cannot be
        split counts as if it were whole."""
        forward, backward = self.passes(samples, degree)
        return forward + backward

    def passes(self, samples: int, degree: int) -> Any:
        """Seconds of each pass by itself: pass x component."""
        found = np.zeros((2, len(self._components)))
        for group in self._groups:
            found[:, group.index] = self._between(group, samples, degree, sizes=False)
        return found

    def sizes(self, samples: int, degree: int) -> Any:
        """Bytes saved for backward and transient beside it: kind x component."""
        found = np.zeros((2, len(self._components)))
        for group in self._groups:
            found[:, group.index] = self._between(group, samples, degree, sizes=True)
        return found

    def least(self, samples: int, degree: int) -> Any:
        """Seconds of :meth:`both`, with tokens cut, too, where that is faster."""
        found = self.both(samples, degree)
        for name in self._times.by_tokens(degree):
            work = self._times.work(self._components[self._places[name]], samples, degree, by_tokens=True)
            found[self._places[name]] = min(found[self._places[name]], work.forward_s + work.backward_s)
        return found

    def _between(self, x: _Alike, samples: int, degree: int, *, sizes: bool) -> Any:
        read = self._bytes if sizes else self._seconds
        if degree in x.degrees:
            return read(x, samples, degree)
        at = bisect_left(x.degrees, degree)
        below = x.degrees[max(0, at - 1)]
        low, share, first = read(x, samples, below), self._share(x, degree), self._share(x, below)
        with np.errstate(divide="ignore", invalid="ignore"):
            if at < len(x.degrees):
                high = read(x, samples, x.degrees[at])
                last = self._share(x, x.degrees[at])
                mix = np.where(first > last, (first - share) / (first - last), 0.0)
            else:
                high = np.full(low.shape, 0.0 if sizes else self._times.floor)
                mix = np.where(first > 0, 1 - share / first, 0.0)
        mix = np.minimum(1.0, np.maximum(0.0, mix))
        return np.maximum(0.0 if sizes else max(0.0, self._times.floor), low + mix * (high - low))

    def _seconds(self, x: _Alike, samples: int, degree: int) -> Any:
        xs = x.xs[degree]
        if samples < xs[0] and x.below[degree]:
            edge = self._measured(x, int(xs[0]), degree)
            small, large = self._measured(x, samples, 1), self._measured(x, int(xs[0]), 1)
            return np.maximum(self._times.floor, edge * _ratio(small, large))
        return self._measured(x, samples, degree)

    def _measured(self, x: _Alike, samples: int, degree: int) -> Any:
        xs, ys = x.xs[degree], x.times[degree]
        if len(xs) == 1:
            floor = np.minimum(self._times.floor, ys[..., 0])
            return floor + (ys[..., 0] - floor) * samples / xs[0]
        return np.maximum(self._times.floor, _line(xs, ys, samples))

    def _bytes(self, x: _Alike, samples: int, degree: int) -> Any:
        xs, ys = x.xs[degree], x.sizes[degree]
        if samples < xs[0] and len(xs) == 1 and x.below[degree]:
            small = self._bytes(x, samples, 1)
            saved, passing = ys[..., 0] * _ratio(small, self._bytes(x, int(xs[0]), 1))
            return np.array([saved, np.maximum(passing, small[1] / degree)])
        return ys[..., 0] * samples / xs[0] if len(xs) == 1 else np.maximum(0.0, _line(xs, ys, samples))

    def _share(self, x: _Alike, degree: int) -> Any:
        if degree not in self._shares:
            whole = [c.split is None for c in self._components]
            self._shares[degree] = np.array(
                [1.0 if w else self._times.share(c, degree) for c, w in zip(self._components, whole, strict=True)]
            )
        return self._shares[degree][x.index]


def _ratio(small: Any, large: Any) -> Any:
    return np.divide(small, large, out=np.ones_like(large), where=large > 0)


def _line(xs: list[float], ys: Any, samples: int) -> Any:
    at = min(max(bisect_left(xs, samples), 1), len(xs) - 1)
    slope = (ys[..., at] - ys[..., at - 1]) / (xs[at] - xs[at - 1])
    if samples > xs[-1]:
        return ys[..., -1] + np.maximum(0.0, slope) * (samples - xs[-1])
    return ys[..., at - 1] + slope * (samples - xs[at - 1])
