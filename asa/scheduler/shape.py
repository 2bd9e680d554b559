"""How the additional time of slower links depends on the message.

Links become slower in different ways. Less bandwidth adds seconds per byte, which hardly shows in small messages; a
longer way adds seconds per message, which hardly shows in large ones. A plan whose messages have other sizes than those
that were measured is priced wrongly if all tables are multiplied by one factor, and so is a change of plan, which sends
much larger messages than a step does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from asa.ir.codec import noun

_FORGETTING = 0.7
"""Weight of earlier windows relative to the next one."""
_DOUBT = 0.01
"""Weight of the assumption that times are only multiplied, relative to all that was measured."""


@noun
class Message:
    """``n`` transfers of one kind: bytes that each link carries, seconds expected of one, and seconds measured."""

    carried_bytes: float
    expected_s: float
    seconds: float
    n: int


@noun
class Shape:
    """Additional seconds of a transfer on a level, per unit of the level's factor above 1: ``multiple`` of the expected
    time, ``delay_s`` per message, and ``byte_s`` per byte that a link carries."""

    multiple: float = 1.0
    delay_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, expected_s: float, carried_bytes: float, factor: float) -> float:
        """Seconds of a transfer that takes ``expected_s`` by the tables, on links slower by ``factor``."""
        if factor <= 1:
            return factor * expected_s
        return expected_s + (factor - 1) * self.added_s(expected_s, carried_bytes)

    def added_s(self, expected_s: float, carried_bytes: float) -> float:
        """Additional seconds of a transfer at a factor of 2."""
        return self.multiple * expected_s + self.delay_s + self.byte_s * carried_bytes

    def log_factor(self, messages: Sequence[Message]) -> float:
        """The logarithm of the factor that explains the total time of ``messages``."""
        ratio = total_ratio(messages)
        if ratio <= 1:
            return math.log(ratio)
        expected_s = sum(m.n * m.expected_s for m in messages)
        added_s = sum(m.n * self.added_s(m.expected_s, m.carried_bytes) for m in messages)
        return math.log1p((ratio - 1) * expected_s / added_s)


def total_ratio(messages: Sequence[Message]) -> float:
    """Measured over expected time of ``messages``, in total, because lower bandwidth hardly changes small ones."""
    return sum(m.n * m.seconds for m in messages) / sum(m.n * m.expected_s for m in messages)


class ShapeFit:
    """Estimates the :class:`Shape` of one level from windows in which its transfers were slow: non-negative weighted
    least squares of the additional time, relative to the expected time. The factor always refers to the messages of the
    first such window."""

    def __init__(self) -> None:
        self.shape = Shape()
        self._scales: NDArray[np.float64] | None = None
        self._products, self._targets = np.zeros((3, 3)), np.zeros(3)

    def update(self, messages: Sequence[Message]) -> None:
        """Update the estimate by the transfers of one window, which were slow."""
        number = np.array([m.n for m in messages])
        expected = np.array([m.expected_s for m in messages])
        terms = np.stack([expected, np.ones(len(messages)), [m.carried_bytes for m in messages]], axis=1)
        weights = number * expected / (number @ expected)
        if self._scales is None:
            self._scales = (number @ expected) / (number @ terms)
        terms = terms * self._scales / expected[:, None]
        added = np.array([m.seconds for m in messages]) / expected - 1
        self._products = _FORGETTING * self._products + (terms.T * weights) @ terms
        self._targets = _FORGETTING * self._targets + (terms.T * weights) @ added
        solution = self._solution()
        if solution.sum() > 0:
            multiple, delay_s, byte_s = (self._scales * solution / solution.sum()).tolist()
            self.shape = Shape(multiple=multiple, delay_s=delay_s, byte_s=byte_s)

    def _solution(self) -> NDArray[np.float64]:
        """Coefficients of the three terms, of which each is 0 or more."""
        products = self._products + _DOUBT * self._products[0, 0] * np.diag([0.0, 1.0, 1.0])
        best, most = np.zeros(3), 0.0
        for count in (1, 2, 3):
            for subset in combinations(range(3), count):
                terms = list(subset)
                part = np.linalg.solve(products[np.ix_(terms, terms)], self._targets[terms])
                explained = float(part @ self._targets[terms])
                if part.min() >= 0 and explained > most:
                    best, most = np.zeros(3), explained
                    best[terms] = part
        return best


__all__ = ["Message", "Shape", "ShapeFit", "total_ratio"]
