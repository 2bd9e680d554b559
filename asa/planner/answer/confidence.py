"""How likely the plan is the best of those considered, and what choosing it costs on average if it is not.

A certificate speaks of costs as they are stated; these are uncertain. So the finalists are priced again under joint
draws of the errors: computation of each component (one draw for all plans that run it: errors that plans share
cancel), what a tensor degree adds to that, and each kind of group that communicates. Draws are log-normal with the
medians as stated, and always the same ones for the same request.

    P(best) = share of draws in which the plan is the fastest, or within 1 % of it
    regret  = mean over draws of (its time - the fastest time) / the fastest time

over draws to which :func:`asa.planner.answer.posterior.prior` adds what no cost foresees: an error of each plan's own,
which near copies share. Without it the fastest of plans 10 % apart is said to be so with certainty, and is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asa.cost.constants import constant
from asa.cost.pipeline import makespans
from asa.cost.planned import Price, StagePrice
from asa.cost.step import hidden_from
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Overlap
from asa.ir.plan import Confidence
from asa.ir.profile import Profile
from asa.planner.answer.posterior import TIE, prior, sample
from asa.planner.space.candidate import Candidate

DRAWS = 256
SAMPLES = 4096
"""Draws of the joint distribution of errors."""
UNLIKE = 0.1
"""Deviation of each plan's own error where two of different kinds are compared, such as a plan and plain data
parallelism: more than that of the best plans, which resemble each other. A lead of 9 % was measured as a loss of 4."""
_SEED = 20250321


class Errors:
    """Draws of errors by name; the same name always gives the same draws."""

    def __init__(self, draws: int) -> None:
        self._draws = draws
        self._known: dict[tuple[object, ...], np.ndarray] = {}
        self._none = np.ones(draws)

    def of(self, deviation: float, *name: object) -> np.ndarray:
        """Factors around 1 with the relative ``deviation``, one for each draw."""
        if deviation == 0:
            return self._none
        key = (deviation, *name)
        if key not in self._known:
            words = np.array([_SEED, *"/".join(map(str, name)).encode()], dtype=np.uint32)
            draws = np.random.default_rng(np.random.SeedSequence(words)).standard_normal(self._draws)
            self._known[key] = np.exp(deviation * draws)
        return self._known[key]


def confidence(
    finalists: Sequence[tuple[Candidate, Price]], profile: Profile, strategies: Strategies, overlap: Overlap
) -> Confidence:
    """Confidence in the first of ``finalists`` among all of them; a plan that was found twice counts once."""
    distinct: dict[object, tuple[Candidate, Price]] = {}
    for candidate, price in finalists:
        distinct.setdefault(candidate.key, (candidate, price))
    known = joint_times(list(distinct.values()), profile, strategies, overlap)
    times = np.exp(sample(*prior(known), SAMPLES)).T if known.min() > 0 else known
    fastest = times.min(axis=0)
    slower = np.divide(times[0], fastest, out=np.ones_like(fastest), where=fastest > 0)
    # Plans that tie are all best: a whole strategy may be found under several names, and its near copies measure alike.
    best = times[0] <= fastest * (1 + TIE)
    return Confidence(
        p_best=float(best.mean()),
        expected_regret=float((slower - 1).mean()),
        finalists=len(finalists),
        draws=SAMPLES,
    )


def faster(
    one: tuple[Candidate, Price], other: tuple[Candidate, Price], profile: Profile, strategies: Strategies,
    overlap: Overlap,
) -> float:  # fmt: skip
    """The probability that ``one`` takes less than ``other``, of another kind, under the same draws."""
    known = joint_times([one, other], profile, strategies, overlap)
    if known.min() <= 0:
        return float((known[0] < known[1]).mean())
    first, second = sample(*prior(known, UNLIKE), SAMPLES).T
    return float((first < second).mean())


def joint_times(
    finalists: Sequence[tuple[Candidate, Price]], profile: Profile, strategies: Strategies, overlap: Overlap
) -> np.ndarray:
    """Seconds of a step: a row for each plan and a column for each draw. Errors that plans share are the same in a
    column."""
    errors = Errors(DRAWS)
    return np.array([_times(c, p, profile, strategies, overlap, errors) for c, p in finalists])


def _times(
    candidate: Candidate, price: Price, profile: Profile, strategies: Strategies, overlap: Overlap, errors: Errors
) -> np.ndarray:
    """Seconds of a step in every draw."""
    model = constant("compute_error" if profile.provenance.trusted else "estimate_error")
    stages = [_stage(candidate, s, overlap, model, errors) for s in price.stages]
    if len(stages) == 1:
        forward, backward, longer, after = stages[0]
        return np.asarray(candidate.num_microbatches * (forward + backward) + longer + after)
    links = errors.of(constant("link_error_assumed"), "handover")
    handovers = np.array([[on * links, back * links] for on, back in price.handovers])
    schedule = strategies.schedules[candidate.schedule]
    return np.asarray(makespans(np.array(stages), handovers, schedule, candidate.num_microbatches))


def _stage(
    candidate: Candidate, stage: StagePrice, overlap: Overlap, model: float, errors: Errors
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of forward and backward of a microbatch, of what lengthens the last backward, and of what comes after it;
    an entry for each draw."""
    sp, sc = overlap.compute_slowdown, overlap.communication_slowdown
    zero = np.zeros(DRAWS)
    forward, backward, once, sync = zero.copy(), zero.copy(), zero.copy(), zero.copy()
    released = [zero.copy() for _ in stage.components]
    windows = []
    for i, c in enumerate(stage.components):
        index = stage.start + i
        way = candidate.ways[index]
        compute = errors.of(model, "compute", index) * errors.of(_relative(c.error_s, c.compute_s), "own", index, way)
        inside = errors.of(_relative(c.link_error_s, c.blocking_s + c.sync_s), "tensor", way.layout.tensor)
        between = errors.of(_relative(c.link_error_s, c.blocking_s + c.sync_s), "data", way.layout.data)
        moved = inside if way.layout.tensor > 1 else between
        forward += c.forward_s * compute + c.forward_communication_s * moved
        backward += c.backward_s * compute + c.backward_communication_s * moved
        once += c.update_s * compute + c.update_communication_s * between
        windows.append((c.backward_s + c.bucket_s) * compute)
        once += c.bucket_s * compute
        sync += c.sync_s * between
        released[i] += c.prompt_sync_s * between
        released[c.release] += c.late_sync_s * between
    for i, b in enumerate(stage.boundaries):
        moved = errors.of(_relative(b.link_error_s, b.blocking_s), "boundary", stage.start + i > 0)
        forward += b.forward_s * moved
        backward += b.backward_s * moved
        once += b.wrapper_s * moved
    if overlap.saving < 0:
        return forward, backward, zero, once + sync - overlap.saving * sc * sync
    both = np.maximum(0.0, hidden_from(np.array(windows), np.array(released), sp, sc).min(axis=0))
    longer = both * (1 - 1 / sp)
    return forward, backward, longer, once + sync - overlap.saving * both - longer


def _relative(error_s: float, seconds: float) -> float:
    """A standard error as a share, at most one half."""
    return round(min(0.5, error_s / seconds), 6) if seconds > 0 else 0.0
