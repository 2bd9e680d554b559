"""Changes of a machine's speed during a measurement."""

from __future__ import annotations

from math import log, sqrt
from statistics import fmean

from asa.errors import InvalidInputError
from asa.ir.codec import noun
from asa.ir.units import MOST_SECONDS


@noun
class Drift:
    """Times of one piece of work, repeated throughout a measurement.

    ``readings``: (seconds since the measurement began, seconds the work took), in order. ``noise``: relative standard
    error of one reading, from the differences of immediate repeats.
    """

    readings: tuple[tuple[float, float], ...]
    noise: float

    def __post_init__(self) -> None:
        at = [a for a, _ in self.readings]
        if not at or at != sorted(at) or at[0] < 0 or at[-1] > MOST_SECONDS:
            raise InvalidInputError(f"readings of a drift are in order, at 0 to {MOST_SECONDS:g} s", where="$.drift")
        if not all(0 < s <= MOST_SECONDS for _, s in self.readings):
            raise InvalidInputError(f"a reading takes more than 0 and at most {MOST_SECONDS:g} s", where="$.drift")
        if not 0 <= self.noise <= 1:
            raise InvalidInputError(f"noise of a reading is 0 to 1, got {self.noise:g}", where="$.drift.noise")

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of the machine's speed: that of the readings, corrected for noise."""
        return sqrt(max(0.0, self._variance - self.noise**2))

    @property
    def ahead(self) -> float:
        """Relative standard deviation of the machine's speed at a later moment from the mean of the readings.

        It is ``deviation * sqrt(1 + 1 / n)`` for n readings, because that mean has a standard error of ``deviation /
        sqrt(n)``.
        """
        return self.deviation * sqrt(1 + 1 / len(self.readings))

    @property
    def _variance(self) -> float:
        logs = [log(s) for _, s in self.readings]
        mean = fmean(logs)
        return sum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1)
