"""Conclusions from paired ratios of a benchmark and their noise, and conditions under which there are none."""

from __future__ import annotations

from asa.ir.bench import Bench, Comparison
from asa.ir.intervals import FEWEST
from asa.report.units import percent

_BUSY = 0.1
"""Number of cores per rank that others may use before there is no verdict."""

NO_VERDICT = ": no verdict; measure again on a quiet machine"
"""How a text on a busy machine ends."""


def noise_of(bench: Bench, model: str) -> Comparison | None:
    """The A/A comparison of ``model``: one strategy against itself; None if there is none."""
    return next((c for c in bench.comparisons if c.model == model and c.left == c.right), None)


def between(bench: Bench, model: str, one: str, other: str) -> str:
    """The faster of two strategies, or why that is unknown; empty if the machine was busy or there are no pairs."""
    pairs = paired(bench, model, one, other)
    return verdict(pairs[0], noise_of(bench, model), disturbed=bool(busy(bench, model))) if pairs else ""


def paired(bench: Bench, model: str, one: str, other: str) -> list[Comparison]:
    """Comparisons of two strategies in pairs; empty if they were not compared."""
    return [c for c in bench.comparisons if c.model == model and {c.left, c.right} == {one, other}]


def busy(bench: Bench, model: str) -> str:
    """Text on the cores that other processes used while ``model`` was measured, if too many; otherwise empty."""
    others = next((c.others_cores for c in bench.comparisons if c.model == model and c.others_cores is not None), None)
    ranks = max((r.ranks for r in bench.of(model)), default=1)
    return busy_note(others, bench.environment.cpu_cores, ranks)


def busy_note(others_cores: float | None, cores: int, ranks: int) -> str:
    """Text on cores that other processes used while ``ranks`` ranks were measured, if too many; otherwise empty."""
    measured = "1 rank was" if ranks == 1 else f"{ranks} ranks were"
    if not (others := others_work(others_cores, cores, ranks)):
        return ""
    return f"{others} while {measured} measured{NO_VERDICT}"


def others_work(others_cores: float | None, cores: int, ranks: int) -> str:
    """Text on the number of cores that other processes used; empty if they took no time from ``ranks`` ranks."""
    if others_cores is None or others_cores <= max(0, cores - ranks) + _BUSY * min(ranks, cores):
        return ""
    return f"other processes kept {others_cores:.1f} of {cores} cores busy"


def against(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """One line on how much less or more time the left strategy takes than the right one; ``asa`` is not named."""
    low, high = sorted((1 - c.low, 1 - c.high))
    spread = f"{'all' if c.pairs < FEWEST else '95 %'}: {100 * low:.1f} to {100 * high:.1f} %, {_pairs(c)}"
    winner = verdict(c, noise, disturbed=disturbed)
    if winner in (c.left, c.right):
        word = "faster" if winner == c.left else "slower"
        if winner == c.right:
            spread = f"95 %: {-100 * high:.1f} to {-100 * low:.1f} %, {_pairs(c)}"
        subject = "" if c.left == "asa" else f"{c.left} is "
        return f"{subject}{percent(abs(1 - c.ratio))} {word} than {c.right} ({spread})"
    both = c.right if c.left == "asa" else f"{c.left} against {c.right}"
    return f"{both}: {percent(1 - c.ratio, signed=True)} ({spread}): {winner or 'no verdict'}"


def _pairs(c: Comparison) -> str:
    return "1 pair" if c.pairs == 1 else f"{c.pairs} pairs"


def verdict(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """The faster strategy, or why that is unknown; empty on a busy machine."""
    if disturbed:
        return ""
    if noise is None:
        return "nothing was measured against itself to tell noise by"
    if c.pairs < FEWEST or noise.pairs < FEWEST:
        return "too few pairs to tell"
    low, high = min(1.0, noise.low), max(1.0, noise.high)
    if c.high < low or c.low > high:
        return c.left if c.high < low else c.right
    return "not told apart from noise"


def comparison(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """A paired ratio with its interval, and the conclusion given ``noise``, the A/A comparison."""
    few = c.pairs < FEWEST
    interval = f"{c.ratio:.3f} ({'all' if few else '95 %'}: {c.low:.3f} to {c.high:.3f}, {_pairs(c)})"
    if c.left == c.right:
        return f"A/A, {c.left} against itself: {interval}: a ratio inside this interval may be noise"
    conclusion = verdict(c, noise, disturbed=disturbed)
    faster = " is faster" if conclusion in (c.left, c.right) else ""
    return f"time of {c.left} over {c.right}: {interval}" + (f": {conclusion}{faster}" if conclusion else "")
