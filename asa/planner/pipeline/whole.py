"""The whole-model strategies of a space, priced with the best number of microbatches for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asa.cost.menu import Menu
from asa.cost.pipeline import makespan
from asa.cost.planned import Price
from asa.ir.codec import noun
from asa.ir.consistency import parse
from asa.ir.plan import TOO_SLOW
from asa.ir.units import GIB, binary
from asa.planner import clock
from asa.planner.pipeline.practice import practice
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space import baselines, consistency
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import TOLERANCE_GIB

_MANY = 30
"""Components beyond which numbers of microbatches are compared by :class:`Quick`."""
_SPLITS = 20
"""Uniform splits beyond which a split is not priced where its compute alone takes longer than another split."""
_PRACTICE = 0.25
"""Share of the time limit for the search of the best uniform split, and for pricing the others."""
UNPRICED = "not priced within the time limit"
_PAST = 1.1
"""Multiple of the best time beyond which more microbatches only make a pipeline slower."""


@noun
class StrategyRow:
    """A whole-model strategy with its price; the candidate is None where it cannot be run."""

    name: str
    candidate: Candidate | None
    price: Price | None
    fits: bool
    why_not: str = ""

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
    at_least = dict.fromkeys(single, 0.0)
    if len(members) > _SPLITS and not space.request.pins and space.request.top_k == 1 and not space.cluster.unequal:
        at_least |= {n: baselines.at_least(n, prices) for n in members - {*wanted, "ddp"} if n in at_least}
    row_of, fastest = dict[str, StrategyRow](), float("inf")
    until = clock.counted() + _PRACTICE * space.request.time_limit_s
    for name in sorted(single, key=at_least.__getitem__):
        if at_least[name] > 0 and (at_least[name] > fastest or clock.counted() > until):
            why = TOO_SLOW if at_least[name] > fastest else UNPRICED
            row_of[name] = StrategyRow(name=name, candidate=None, price=None, fits=False, why_not=why)
            continue
        row_of[name] = row(name, prices)
        if name in members and row_of[name].fits:
            fastest = min(fastest, row_of[name].seconds)
    rows = [row_of[n] for n in single]
    if "hybrid" in names:
        best = min((r for r in rows if r.name in members), key=lambda r: (not r.fits, r.seconds))
        rows.append(
            StrategyRow(name="hybrid", candidate=best.candidate, price=best.price, fits=best.fits, why_not=best.why_not)
        )
    return [*rows, *_served(prices, next((r for r in rows if r.name == "ddp"), None))]


def _served(prices: Prices, ddp: StrategyRow | None) -> list[StrategyRow]:
    """Parameter servers on the workers of data parallelism, for comparison only: without a candidate."""
    if ddp is None or ddp.candidate is None:
        return []
    workers = ddp.candidate
    prices_of = {n: consistency.disciplined(prices, workers, parse(n)).price for n in consistency.TABLED}
    return [
        StrategyRow(name=n, candidate=None, price=p, fits=False, why_not=consistency.why_not(n))
        for n, p in prices_of.items()
    ]


def row(name: str, prices: Prices) -> StrategyRow:
    """One whole-model strategy: a single stage with the fewest microbatches that fit (one where none do), or a pipeline
    with the number that makes it fastest."""
    if name == baselines.BEST_AGAIN:
        return _practised(prices)
    first: Candidate | None = None
    best: tuple[float, Candidate] | None = None
    quick = Quick(prices) if len(prices.space.profile.graph) > _MANY and not prices.space.cluster.unequal else None
    try:
        for candidate in baselines.candidates(name, prices):
            if best is not None and prices.at_least(candidate) > _PAST * best[0]:
                break
            several = len(candidate.widths) > 1
            if quick is not None and several:
                seconds, peak = quick.of(candidate)
            else:
                seconds, peak = prices.of(candidate).cost.total_s, prices.of(candidate).peak.total
            first = first or candidate
            if peak <= _limit(prices, candidate) and (best is None or seconds < best[0]):
                best = seconds, candidate
            if best is not None and (not several or seconds > _PAST * best[0]):
                break
            if best is None and quick is None and _overfull(prices, candidate):
                break
    except baselines.Unavailable as reason:
        return StrategyRow(name=name, candidate=None, price=None, fits=False, why_not=str(reason))
    chosen = first if best is None else best[1]
    assert chosen is not None
    price, free = prices.of(chosen), prices.capacity(chosen)
    fits = prices.fits(chosen)
    rest = f" of {binary(free)}" if free > 0 else ", and the context of the device leaves nothing of its memory"
    why = "" if fits else f"{binary(price.peak.total)}{rest}"
    return StrategyRow(name=name, candidate=chosen, price=price, fits=fits, why_not=why)


def _practised(prices: Prices) -> StrategyRow:
    """The best uniform split of all devices, with as much recomputation as memory requires."""
    limit_s = prices.space.request.time_limit_s
    until = clock.counted() + _PRACTICE * limit_s
    plan = practice(prices, prices.space.pinned, until, (1 - _PRACTICE) * limit_s)
    if plan is None:
        return StrategyRow(
            name=baselines.BEST_AGAIN, candidate=None, price=None, fits=False, why_not="no uniform split fits"
        )
    return StrategyRow(name=baselines.BEST_AGAIN, candidate=plan, price=prices.of(plan), fits=True)


def _limit(prices: Prices, candidate: Candidate) -> float:
    return prices.capacity(candidate) + TOLERANCE_GIB * GIB


def _overfull(prices: Prices, candidate: Candidate) -> bool:
    """Whether parameters and optimizer state exceed memory for any number of microbatches: those of a single stage, or
    of one component of a pipeline, whose cuts may move."""
    states = [c.footprint.state for c in prices.of(candidate).components]
    return (sum(states) if len(candidate.widths) == 1 else max(states)) > _limit(prices, candidate)


class Quick:
    """Step seconds and highest peak bytes of pipelines that run all components of a stage alike, on equal devices. It
    serves models of thousands of components: all are priced together for any number of microbatches."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._menus: dict[tuple[object, ...], Menu] = {}

    def of(self, candidate: Candidate) -> tuple[float, float]:
        """Step seconds and peak bytes, about as by :meth:`asa.planner.space.candidate.Prices.of`."""
        prices, m, width = self.prices, candidate.num_microbatches, candidate.widths[0]
        pricer = prices.pricer(width, m, prices.busy(candidate))
        if (width, candidate.ways) not in self._menus:
            self._menus[width, candidate.ways] = prices.menu_of(pricer, [[w] for w in candidate.ways])
        priced = self._menus[width, candidate.ways].priced(pricer, np.arange(len(candidate.ways)))
        uniform = Uniform(pricer, prices.space.cluster.overlap, candidate.ways, priced)
        p, schedule = len(candidate.widths), prices.space.strategies.schedules[candidate.schedule]
        ends = zip(candidate.starts, (*candidate.starts[1:], len(candidate.ways)), strict=True)
        stages = [uniform.stage(a, b, schedule.in_flight(s, p, m)) for s, (a, b) in enumerate(ends)]
        moves = [
            pricer.handover(a, candidate.ways[a - 1].layout, candidate.ways[a].layout, s * width)
            for s, a in enumerate(candidate.starts) if s
        ]  # fmt: skip
        return makespan([times for times, _ in stages], moves, schedule, m), max(peak for _, peak in stages)
