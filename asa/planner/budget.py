"""Limits of a search: shares of its time limit, seconds of work, and counts.

A figure that was set by measurements names the decision record that has them. ``benchmarks/ablation.py`` measures what
each mechanism is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUNDING = 1e-9
"""Relative difference up to which times, bounds or bytes count as equal: they are sums of many rounded numbers."""

PROVED = 1e-6
"""Gap up to which a plan counts as proved optimal."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits on the search of cuts, widths and stages: counts, and shares of a bound."""

    listed: int = 200
    """Most plans (cuts and widths) that are solved one by one; if there are more, their stages are searched in full
    (decision 0050)."""
    shared: int = 3
    """Average number of listed plans per stage from which on stages are searched in full."""
    wider: float = 4.0
    """Factor by which the limit of listed plans moves on from the bound each time (0049)."""
    stride: float = 0.3
    """Least share of the distance from the bound to the best plan that one such move takes (0049)."""
    leap: float = 0.28
    """Share of the bound; a distance up to this is taken in one move (0049)."""
    leap_tight: float = 0.06
    """This share where memory binds: each move costs more there (0018)."""
    turns: int = 8
    """Number of weightings of a pipeline's critical paths that are tried for the same cuts and widths (0050)."""
    labels: int = 100
    """Labels that are kept after each component of a stage at first; beyond, similar ones are merged (0023)."""
    ilp_ways: int = 1_000
    """Most ways of all components together with which the ILP is likely to prove a stage within a second."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one search. Seconds are seconds of work (:mod:`asa.planner.clock`), shares are of the time limit, and
    gaps are relative to the best plan."""

    narrower_s: float = 0.15
    """Seconds for whole strategies on fewer devices (decision 0033)."""
    singles: float = 0.25
    """Share for single stages before everything is searched together (0041)."""
    singles_s: float = 0.5
    """Most seconds of that share."""
    outlines: float = 0.3
    """Share for first plans of pipelines (0041)."""
    outlines_s: float = 0.15
    """Least seconds for these, whatever the time limit (0041)."""
    patience_s: float = 0.8
    """Seconds after which a search ends when its gap is at most ``enough``."""
    enough: float = 0.005
    """Gap at which a search may end: a tenth of the usual error of a predicted step time."""
    nearly: float = 0.03
    """Gap at which the search of single stages alone ends."""
    rest: float = 0.15
    """Least share for the search after first plans, whatever these took."""
    again_s: float = 0.5
    """Seconds for the ILP to solve again what the label program has proved."""
    ilp_s: float = 0.55
    """Least seconds for which the ILP is started; in less it would not finish (0036)."""
    polish: float = 1 / 8
    """Share for a local search around an answer that is not proved, and for ties (0033)."""
    polish_s: float = 0.5
    """Most seconds of that share (0033)."""
    effort: Effort = field(default_factory=Effort)


USUAL = Budget()
"""The default budget."""
