"""Choice of microbatches and tensor degrees to measure, and a forecast of the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

WHOLE = 0
"""Value of a tensor degree for the whole, unsplit model. Negative degrees are those with split tokens."""

_WARMUP_LAPS = 1.2
"""Cost of the lap that records memory, in laps, before one was seen."""


def microbatches(global_batch: int) -> list[int]:
    """Powers of two up to ``global_batch``, and itself; largest first.

    >>> microbatches(48)
    [48, 32, 16, 8, 4, 2, 1]
    """
    powers = [1 << k for k in range(global_batch.bit_length()) if 1 << k < global_batch]
    return [global_batch, *reversed(powers)]


def degrees_up_to(largest: int, splittable: Iterable[int]) -> list[int]:
    """Powers of two up to ``largest`` and the largest ``max_degree`` in ``splittable``."""
    limit = min(largest, max(splittable, default=1))
    return [1 << k for k in range(limit.bit_length()) if 1 << k <= limit] or [1]


def is_wanted(size: int, degree: int, batch: int, largest: int) -> bool:
    """Whether a tensor degree is measured at a microbatch.

    With ``largest`` devices and ``batch`` samples a step, degree t leaves at most ``largest / t`` replicas, so plans
    without accumulation use microbatches from ``batch * t / largest`` up: all of those are measured, and below them
    (for plans that accumulate) every other power of two. Degree 1 is measured everywhere.
    """
    steps_below = 0
    while size * largest < batch * degree:
        size, steps_below = size * 2, steps_below + 1
    return degree == 1 or steps_below % 2 == 0


def line_through(first: tuple[int, float], second: tuple[int, float]) -> Callable[[int], float]:
    """Seconds as a function of size: a line through two measured points; proportional to size if there is only one.

    Never decreasing: if the larger size took less time, the slope is 0.
    """
    (n, a), (m, b) = first, second
    slope = max((b - a) / (m - n), 0.0) if m > n else a / n
    return lambda size: max(b + slope * (size - m), 1e-9)


class Forecast:
    """Expected seconds of a lap at a microbatch and degree: from a first line, then from the laps so far."""

    def __init__(self, first: tuple[int, float], second: tuple[int, float], whole_ratio: float = 1.0) -> None:
        """``first``, ``second``: (size, seconds) of two laps. ``whole_ratio``: seconds of a whole model's step over
        those of a lap."""
        self.whole = whole_ratio
        self.seconds = line_through(first, second)
        self._laps: dict[int, tuple[int, float]] = {}
        self._begun: dict[int, tuple[int, float]] = {}

    def learn(self, size: int, degree: int, seconds: float, before: float = 0.0) -> None:
        """Record that a lap of ``degree`` took ``seconds`` at microbatch ``size``, and how many went by ``before``
        the first that was timed."""
        self._laps[degree] = (size, seconds)
        self._begun[degree] = (size, before)

    def lap(self, size: int, degree: int) -> float:
        """Expected seconds, scaled from the last lap of that degree; a guess if there was none."""
        if degree in self._laps:
            last, seconds = self._laps[degree]
            return seconds * self.seconds(size) / self.seconds(last)
        return self.seconds(size) * (self.whole if degree == WHOLE else 0.25 + 0.75 / abs(degree))

    def fits(self, size: int, degrees: Sequence[int], laps: int, slice_s: float) -> bool:
        """Whether ``laps`` laps of each degree, and one for warm-up, end within ``slice_s`` seconds."""
        return self.cost(size, degrees, laps) <= slice_s

    def cost(self, size: int, degrees: Sequence[int], laps: int) -> float:
        """Expected seconds of ``laps`` laps of each degree, and of what comes before them: the lap that records memory,
        or what it took last time where that was more, as it is where kernels are tried for every new size."""
        return sum(laps * self.lap(size, d) + self._before(size, d) for d in degrees)

    def _before(self, size: int, degree: int) -> float:
        measured = degree if degree in self._begun else next(iter(self._begun), None)
        earlier = self._begun[measured][1] if measured is not None else 0.0
        return max(_WARMUP_LAPS * self.lap(size, degree), earlier)
