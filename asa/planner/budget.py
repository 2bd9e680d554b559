"""Limits of a search: shares of its time limit, seconds of work, and how closely it looks.

A figure that was set by a decision's measurements names that decision. ``benchmarks/ablation.py`` measures what a
mechanism is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUNDING = 1e-9
"""Share by which times, bounds or bytes may differ and are taken for equal: they are sums of many numbers."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits on how closely cuts, widths and stages are searched: numbers, and shares of a bound."""

    listed: int = 200
    """Cuts and widths up to which they are looked at one by one, rather than their stages in full (decision 0050)."""
    shared: int = 3
    """Listed plans, on average, that a stage is in, from which on it is explored in full."""
    wider: float = 4.0
    """Factor by which the limit of listed plans moves on from the bound each time (0049)."""
    stride: float = 0.3
    """Share of the way from the bound to the best plan that one such move takes at least (0049)."""
    leap: float = 0.28
    """Share of the bound up to which one move goes all that way (0049)."""
    leap_tight: float = 0.06
    """Such a share where memory binds: exploring anew costs more there (0018)."""
    turns: int = 8
    """Weights of the clock that are tried for plans with the same cuts and widths (0050)."""
    labels: int = 100
    """Labels of a stage kept behind a component at first, before similar ones are merged (0023)."""
    handy: int = 1_000
    """Ways of all components together up to which the ILP is likely to prove a stage within a second."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one search. Seconds are of work (:mod:`asa.planner.clock`), shares are of the time limit, gaps of the
    best plan."""

    narrower_s: float = 0.15
    """For whole strategies on fewer devices (decision 0033)."""
    singles: float = 0.25
    """Share for single stages before all is searched together (0041)."""
    singles_s: float = 0.5
    """Most seconds of that."""
    outlines: float = 0.3
    """Share for first plans of pipelines (0041)."""
    outlines_s: float = 0.15
    """For these whatever the time limit is (0041)."""
    patience_s: float = 0.8
    """From then on the gap ``enough`` ends a search."""
    enough: float = 0.005
    """Gap not worth searching on for: a tenth of the usual error of a step time."""
    nearly: float = 0.03
    """Gap from which on single stages wait for pipelines."""
    rest: float = 0.15
    """Share for all that is left after first plans at least, whatever these took."""
    again_s: float = 0.5
    """For the ILP to solve once more what labels have proved."""
    ilp_s: float = 0.55
    """A shorter turn is not given to the ILP, which would not get to its end (0036)."""
    polish: float = 1 / 8
    """Share for a local search beside an answer that is not proved, and for ties (0033)."""
    polish_s: float = 0.25
    """Most seconds of that (0033)."""
    effort: Effort = field(default_factory=Effort)


USUAL = Budget()
"""The budget of every search that is not given another one."""
