"""Steps that do not count go on until they touch no new memory on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from asa.executor.observing.warmup import NEGLIGIBLE_BYTES, warm_up


class Ranks:
    """Votes of this rank and one that touches ``others`` bytes in each step."""

    def __init__(self, others: Sequence[float]) -> None:
        self.others = iter(others)

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values, [next(self.others)]]


def run(
    mine: Sequence[int], others: Sequence[int], seconds: float = 0.1, *, least: int = 3, hurried: bool = False
) -> int:
    """How many steps are taken where steps touch so many bytes on two ranks."""
    taken: list[float] = []

    def memory() -> Iterator[int]:
        total = 0
        for step in mine:
            yield total
            total += step
            yield total

    look = memory()
    warm_up(
        lambda: taken.append(seconds) or seconds, Ranks(others), least=least, hurried=hurried, memory=lambda: next(look)
    )  # type: ignore[arg-type,func-returns-value]
    return len(taken)


@pytest.mark.parametrize(
    ("new", "hurried", "seconds", "steps"),
    [([], False, 0.1, 3), ([], True, 0.1, 3), ([], True, 5.0, 2), ([9, 9, 9, 9, 9], False, 0.1, 6),
     ([9, 9, 9, 9], True, 5.0, 5), ([9] * 20, False, 0.1, 10)],
)  # fmt: skip
def test_until_nothing_new_is_touched(new, hurried, seconds, steps):
    touched = [n * NEGLIGIBLE_BYTES for n in new] + [0] * 20
    assert run(touched, [0] * 40, seconds, hurried=hurried) == steps
    assert run([0] * 40, touched, seconds, hurried=hurried) == steps


def test_plans_that_are_warm_are_asked_for_one_more_step_and_for_more_where_they_take_memory_from_each_other():
    assert run([0] * 20, [0] * 20, least=1) == 1
    assert run([9 * NEGLIGIBLE_BYTES, 0, 0], [0] * 20, least=1) == 2
