"""How likely the plan is the best of those considered, and what choosing it costs on average if it is not.

A certificate takes predicted costs as exact, but they are uncertain. So the finalists are priced again under joint
draws of the errors. There is one error for the computation of each component (the same for all plans, so that it
cancels), one for what its way adds, and one for each kind of group that communicates. Draws are log-normal around the
predicted costs, and always the same for the same request.

    P(best) = share of draws in which the plan is the fastest, or within 1 % of it
    regret  = mean over draws of (its time - the fastest time) / the fastest time

:func:`asa.planner.answer.posterior.prior` adds to these draws an error of each plan's own, which similar plans share:
the cost model does not predict everything. Without it a lead of 10 % would count as certain, which it is not.
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
"""Numbers of joint draws: of the errors of costs, and of step times with each plan's own error."""
UNLIKE = 0.1
"""Relative deviation of each plan's own error where two unlike plans are compared, such as a mixed plan and plain data
parallelism. It exceeds that of finalists, which are similar: a predicted lead of 9 % was measured as a loss of 4 %."""
_SEED = 20250321


class Errors:
    """Random factors for errors by name; the same name always gives the same draws."""

    def __init__(self, draws: int) -> None:
        self._draws = draws
        self._known: dict[tuple[object, ...], np.ndarray] = {}
        self._none = np.ones(draws)

    def of(self, deviation: float, *name: object) -> np.ndarray:
        """Log-normal factors with median 1 and the relative ``deviation``, one for each draw."""
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
    """The confidence that the first of ``finalists`` is the best of them. A plan that was found twice counts once."""
    distinct: dict[object, tuple[Candidate, Price]] = {}
    for candidate, price in finalists:
        distinct.setdefault(candidate.key, (candidate, price))
    draws = joint_times(list(distinct.values()), profile, strategies, overlap)
    times = np.exp(sample(*prior(draws), SAMPLES)).T if draws.min() > 0 else draws
    fastest = times.min(axis=0)
    slower = np.divide(times[0], fastest, out=np.ones_like(fastest), where=fastest > 0)
    # Plans that tie are all best: measurements cannot tell similar plans apart.
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
    """The probability that ``one`` is faster than ``other``, a plan of another kind, under the same draws."""
    draws = joint_times([one, other], profile, strategies, overlap)
    if draws.min() <= 0:
        return float((draws[0] < draws[1]).mean())
    first, second = sample(*prior(draws, UNLIKE), SAMPLES).T
    return float((first < second).mean())


def joint_times(
    finalists: Sequence[tuple[Candidate, Price]], profile: Profile, strategies: Strategies, overlap: Overlap
) -> np.ndarray:
    """Seconds of a step, of shape (plans, :data:`DRAWS`). In one column all plans have the same errors of what they
    share."""
    errors = Errors(DRAWS)
    return np.array([_times(c, p, profile, strategies, overlap, errors) for c, p in finalists])


def _times(
    candidate: Candidate, price: Price, profile: Profile, strategies: Strategies, overlap: Overlap, errors: Errors
) -> np.ndarray:
    """Seconds of a step, an entry for each draw."""
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
    """Four arrays of seconds with an entry for each draw: forward and backward of a microbatch, what overlap adds to
    the last backward, and what comes after it."""
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
    """A standard error as a share of ``seconds``, at most one half; 0 where nothing takes time."""
    return round(min(0.5, error_s / seconds), 6) if seconds > 0 else 0.0
