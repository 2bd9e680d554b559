"""The whole-model strategies of a space, priced with the best number of microbatches for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asa.cost.planned import Price
from asa.ir.codec import noun
from asa.ir.consistency import parse
from asa.ir.plan import TOO_SLOW
from asa.planner import clock
from asa.planner.pipeline.practice import practice
from asa.planner.space import baselines, consistency
from asa.planner.space.candidate import Candidate, Prices

_SPLITS = 20
"""Uniform splits beyond which a split is not priced where its compute alone takes longer than another split."""
_PRACTICE = 0.25
"""Share of the time limit for the search of the best uniform split, and for pricing the others."""
UNPRICED = "not priced within the time limit"
_PAST = 1.1
"""Multiple of the best time beyond which more microbatches only make a pipeline slower."""


@noun
class StrategyRow:
    """A whole-model strategy with its price; the candidate is None where it cannot be run. ``bound_s``: a lower bound
    in seconds on its plans that were not priced, infinite if all that could be faster were."""

    name: str
    candidate: Candidate | None = None
    price: Price | None = None
    fits: bool = False
    why_not: str = ""
    bound_s: float = float("inf")

    @property
    def seconds(self) -> float:
        """Step time in seconds; infinite where there is none."""
        return self.price.cost.total_s if self.price is not None else float("inf")


def table(prices: Prices, wanted: Sequence[str] = ()) -> list[StrategyRow]:
    """Every whole-model strategy, priced, and the non-standard ones among ``wanted`` (such as ``hybrid:d3t2`` of 8)."""
    space = prices.space
    names = dict.fromkeys((*baselines.names(space.strategies, space.request.gpus), *wanted))
    members = set(baselines.members("hybrid", space.strategies, space.request.gpus))
    single = [n for n in names if n not in ("asa", "hybrid")]
    asked = {*wanted, *(members if "hybrid" in wanted else ())}
    at_least = dict.fromkeys(single, 0.0)
    if len(members) > _SPLITS and not space.request.pins and space.request.top_k == 1 and not space.cluster.unequal:
        at_least |= {n: baselines.at_least(n, prices) for n in members - {*wanted, "ddp"} if n in at_least}
    row_of, fastest = dict[str, StrategyRow](), float("inf")
    until = clock.counted() + _PRACTICE * space.request.time_limit_s
    for name in sorted(single, key=at_least.__getitem__):
        if at_least[name] > 0 and (at_least[name] > fastest or clock.counted() > until):
            why = TOO_SLOW if at_least[name] > fastest else UNPRICED
            row_of[name] = StrategyRow(name=name, why_not=why, bound_s=at_least[name])
            continue
        row_of[name] = row(name, prices, thorough=name in asked)
        if name in members and row_of[name].fits:
            fastest = min(fastest, row_of[name].seconds)
    rows = [row_of[n] for n in single]
    if "hybrid" in names:
        best = min((r for r in rows if r.name in members), key=lambda r: (not r.fits, r.seconds))
        rows.append(replace(best, name="hybrid", bound_s=float("inf")))
    return [*rows, *_served(prices, next((r for r in rows if r.name == "ddp"), None))]


def _served(prices: Prices, ddp: StrategyRow | None) -> list[StrategyRow]:
    """Parameter servers on the workers of data parallelism, for comparison only: without a candidate."""
    if ddp is None or ddp.candidate is None or not ddp.seconds:
        return []
    workers = ddp.candidate
    prices_of = {n: consistency.disciplined(prices, workers, parse(n)).price for n in consistency.TABLED}
    return [StrategyRow(name=n, price=p, why_not=consistency.why_not(n)) for n, p in prices_of.items()]


def row(name: str, prices: Prices, *, thorough: bool = False) -> StrategyRow:
    """One whole-model strategy: a single stage with the fewest microbatches that fit (one where none do), or a pipeline
    with the number that makes it fastest. Unless ``thorough``, numbers beyond one that is far slower are left out."""
    if name == baselines.BEST_AGAIN:
        return _practised(prices)
    first: Candidate | None = None
    best: tuple[float, Candidate] | None = None
    try:
        for candidate in baselines.candidates(name, prices):
            if best is not None and prices.at_least(candidate) > _PAST * best[0]:
                if thorough:
                    continue
                break
            seconds, peak = prices.of(candidate).cost.total_s, prices.of(candidate).peak.total
            first = first or candidate
            if peak <= prices.capacity(candidate) and (best is None or seconds < best[0]):
                best = seconds, candidate
            if best is not None and (len(candidate.widths) == 1 or (seconds > _PAST * best[0] and not thorough)):
                break
            if best is None and _overfull(prices, candidate):
                break
    except baselines.Unavailable as reason:
        return StrategyRow(name=name, why_not=str(reason))
    chosen = first if best is None else best[1]
    assert chosen is not None
    fits = prices.fits(chosen)
    why = "" if fits else prices.lacking(chosen)
    return StrategyRow(name=name, candidate=chosen, price=prices.of(chosen), fits=fits, why_not=why)


def _practised(prices: Prices) -> StrategyRow:
    """The best uniform split of all devices, with as much recomputation as memory requires."""
    limit_s = prices.space.request.time_limit_s
    until = clock.counted() + _PRACTICE * limit_s
    plan, bound_s = practice(prices, prices.space.pinned, until, (1 - _PRACTICE) * limit_s)
    why = "" if plan else "no uniform split fits" if bound_s == float("inf") else UNPRICED
    price = prices.of(plan) if plan else None
    return StrategyRow(
        name=baselines.BEST_AGAIN, candidate=plan, price=price, fits=plan is not None, why_not=why, bound_s=bound_s
    )


def _overfull(prices: Prices, candidate: Candidate) -> bool:
    """Whether parameters and optimizer state exceed memory for any number of microbatches: those of a single stage, or
    of one component of a pipeline, whose cuts may move."""
    price = prices.of(candidate)
    state = price.peak.state if len(candidate.widths) == 1 else max(c.footprint.state for c in price.components)
    return state > prices.capacity(candidate)
