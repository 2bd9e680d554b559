"""Beliefs about the step times of some plans, updated by measurements, and which plans to measure next.

The logarithms of the step times are jointly normal. Prior: means and covariances of the joint draws of the errors of
costs (:mod:`asa.planner.answer.confidence`), plus an error common to all plans and an error of each plan's own, for
what the cost model leaves out. Likelihood: each time of a round has its own noise, and all times of a round share a
drift of the machine, so the differences between plans are learned faster than their times.

    worth of a round with some plans = least mean now - expected least mean after it

which is the knowledge gradient for correlated beliefs (Frazier, Powell and Dayanik 2009). It is computed for several
numbers of equal rounds, and the best worth per round counts, since one round may be too little to change the choice
(Frazier and Powell 2010).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asa.ir.codec import noun

Round = Mapping[int, float]
"""Seconds per step of the plans measured in this round, by their index."""

COMMON = 0.3
"""Relative deviation of the error that all plans share: the machine's state differs from when it was profiled."""
OWN = 0.06
"""Relative deviation of a plan's own error, which the cost model does not explain; similar plans share it. For 2,340
plans of the regret records of November 2026 it was 0.05 to 0.09 within a cell, noise of measurement included."""
TIE = 0.01
"""Share of a step by which two plans may differ and both be the best: two runs of one plan differ as much."""
ALIKE, ALONE = 0.02, 0.1
"""Similarity of two plans' own errors. Their correlation falls with the deviation of the log ratio of their draws, to
1/e of its maximum at ``ALIKE``; ``ALONE`` is the share of the variance that no two plans have in common."""
NOISE, _DRIFT, _KNOWN = 0.03, 0.03, 4.0
"""Expected relative deviations of one step's noise and of one round's drift before anything was measured, and the
number of observations that this expectation counts for."""
_CLIP = 3.0
"""Number of deviations to which residuals are clipped, so that outliers have little influence."""
_AHEAD = (1, 4, 16)
"""Numbers of equal rounds for which the worth is computed."""
DRAWS = 4096
_SEED = 20250321


@noun
class Belief:
    """For each plan: the probability that it is within :data:`TIE` of the fastest, and its expected regret, the mean
    share by which it is slower than the fastest."""

    p_best: tuple[float, ...]
    expected_regret: tuple[float, ...]

    @property
    def best(self) -> int:
        """The plan to choose: the one with the least expected regret."""
        return min(range(len(self.expected_regret)), key=self.expected_regret.__getitem__)


def prior(draws: np.ndarray, own: float = OWN) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of the logarithms of step times before anything is measured. ``draws`` as for
    :class:`Posterior`; ``own``: relative deviation of each plan's own error."""
    logs = np.log(draws)
    centred = logs - logs.mean(axis=1, keepdims=True)
    distance = np.sqrt(((centred[:, None] - centred[None]) ** 2).mean(axis=2))
    errors = own**2 * ((1 - ALONE) * np.exp(-((distance / ALIKE) ** 2)) + ALONE * np.eye(len(logs)))
    return logs.mean(axis=1), np.atleast_2d(np.cov(logs)) + COMMON**2 + errors


def sample(mean: np.ndarray, covariance: np.ndarray, count: int) -> np.ndarray:
    """Joint normal draws of shape (count, plans), in pairs symmetric about the mean; always from the same seed."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    half = np.random.default_rng(_SEED).standard_normal((count // 2, len(mean)))
    return np.asarray(mean + np.concatenate((half, -half)) @ root.T)


class Posterior:
    """Beliefs after some rounds. ``draws``: seconds of a step before any, of shape (plans, draws); ``noise``: the
    relative deviation of one step that is expected before any was measured."""

    def __init__(self, draws: np.ndarray, rounds: Sequence[Round] = (), *, noise: float = NOISE) -> None:
        self.mean, self.covariance = prior(draws)
        noted = [{i: float(np.log(s)) for i, s in r.items()} for r in rounds if r]
        self.noise, self.drift, cleaned = _spread(noted, noise)
        for one in cleaned:
            self._learn(sorted(one), np.array([one[i] for i in sorted(one)]))

    def _learn(self, plans: list[int], logs: np.ndarray) -> None:
        gain = self._gain(plans, 1)
        self.mean = self.mean + gain @ (logs - self.mean[plans])
        left = self.covariance - gain @ self.covariance[plans]
        self.covariance = (left + left.T) / 2

    def _gain(self, plans: list[int], times: int) -> np.ndarray:
        seen = self.covariance[np.ix_(plans, plans)] + self._error(len(plans)) / times
        return np.asarray(np.linalg.solve(seen, self.covariance[plans]).T)

    def _error(self, count: int) -> np.ndarray:
        return self.noise**2 * np.eye(count) + self.drift**2

    def belief(self) -> Belief:
        """The belief, from joint draws that are the same for the same rounds."""
        times = np.exp(sample(self.mean, self.covariance, DRAWS))
        fastest = times.min(axis=1, keepdims=True)
        return Belief(
            p_best=tuple(float(x) for x in (times <= fastest * (1 + TIE)).mean(axis=0)),
            expected_regret=tuple(float(x) for x in (times / fastest - 1).mean(axis=0)),
        )

    def worth(self, plans: Sequence[int]) -> float:
        """The share of a step by which measuring ``plans`` in one more round is expected to lower the time of the plan
        that is then chosen."""
        chosen, best = sorted(set(plans)), 0.0
        for times in _AHEAD:
            gain = self._gain(chosen, times)
            moved = gain @ self.covariance[chosen]
            means = sample(self.mean, (moved + moved.T) / 2, DRAWS // 4)
            best = max(best, float(self.mean.min() - means.min(axis=1).mean()) / times)
        return best


def _spread(rounds: list[dict[int, float]], expected: float) -> tuple[float, float, list[dict[int, float]]]:
    """Deviation of a step's noise, deviation of a round's drift, and the rounds with outliers clipped; in logarithms.
    ``expected``: the deviation of a step before any was measured.

    The model is two-way: a time is the sum of its plan's median, its round's offset, and noise.
    """
    if not rounds:
        return expected, _DRIFT, []
    centre = {i: float(np.median([r[i] for r in rounds if i in r])) for i in {i for r in rounds for i in r}}
    off = [float(np.median([x - centre[i] for i, x in r.items()])) if len(r) > 1 else 0.0 for r in rounds]
    rest = [{i: x - centre[i] - o for i, x in r.items()} for r, o in zip(rounds, off, strict=True)]
    flat = np.array([x for r in rest for x in r.values()])
    limit = _CLIP * max(1.4826 * float(np.median(np.abs(flat))), expected / 3)
    kept = [{i: float(np.clip(x, -limit, limit)) for i, x in r.items()} for r in rest]
    free = max(0.0, len(flat) - len(centre) - len(rounds) + 1.0)
    squares = sum(x * x for r in kept for x in r.values())
    noise = float(np.sqrt((_KNOWN * expected**2 + squares) / (_KNOWN + free)))
    far = np.clip(off, -0.5, 0.5)
    drift = float(np.sqrt((_KNOWN * _DRIFT**2 + float(far @ far)) / (_KNOWN + max(0, len(rounds) - 1))))
    cleaned = [{i: centre[i] + o + x for i, x in k.items()} for k, o in zip(kept, off, strict=True)]
    return noise, drift, cleaned


@noun
class Policy:
    """A policy that says which plans are measured next. ``draws`` and ``noise`` as for :class:`Posterior`; the plans
    of ``always`` come first.

    Every plan is measured once together with the first of ``always`` before any is measured twice. Measuring ends when
    the expected regret of the choice is below ``enough`` and the choice and the plans of ``always`` were measured
    ``least`` times. With more ``noise`` more rounds are needed for that.
    """

    draws: tuple[tuple[float, ...], ...]
    always: tuple[int, ...]
    enough: float = 0.005
    least: int = 3
    noise: float = NOISE

    def next(self, rounds: Sequence[Round], left_s: float, build_s: float = 0.0) -> tuple[int, ...]:
        """The plans of the next round; none where measuring is to end.

        ``left_s``: seconds that may still be spent; ``build_s``: seconds to build a plan before its first round.
        """
        turns = [sum(i in r for r in rounds) for i in range(len(self.draws))]
        expected = np.median(np.array(self.draws), axis=1)
        posterior = Posterior(np.array(self.draws), rounds, noise=self.noise)
        now = np.exp(posterior.mean) if rounds else expected

        def affordable(plans: Sequence[int]) -> tuple[int, ...]:
            wanted = tuple(dict.fromkeys(plans))
            needed = sum(now[i] + (0.0 if turns[i] else max(build_s, 2 * now[i])) for i in wanted)
            return wanted if needed <= left_s else ()

        unseen = [i for i in self.always if not turns[i]] or [i for i, n in enumerate(turns) if not n]
        if unseen:
            found = affordable(self.always if unseen[0] in self.always else (self.always[0], unseen[0]))
            if found or not any(turns):
                return found or self.always
        belief = posterior.belief()
        leader = belief.best
        few = [i for i in dict.fromkeys((*self.always, leader)) if turns[i] < self.least]
        if few:
            return affordable((leader, *few, *self.always[:1]))
        if belief.expected_regret[leader] < self.enough:
            return ()
        rivals = [i for i in range(len(turns)) if i != leader and turns[i]]
        sets = [found for i in rivals if (found := affordable((leader, i)))]
        return max(sets, key=lambda s: posterior.worth(s) / sum(now[i] for i in s), default=())


def choose(
    draws: np.ndarray, rounds: Sequence[Round], guard: int | None, *, noise: float = NOISE
) -> tuple[int, Belief, Belief]:
    """The plan to run, and the beliefs before and after measuring. ``noise`` as for :class:`Posterior`.

    A plan whose measured median is above that of ``guard`` (plain data parallelism) is replaced by it.
    """
    before, after = Posterior(draws).belief(), Posterior(draws, rounds, noise=noise).belief()
    medians = {i: float(np.median([r[i] for r in rounds if i in r])) for i in {i for r in rounds for i in r}}
    order = sorted(medians, key=after.expected_regret.__getitem__) or [before.best]
    best = order[0]
    if guard is not None and guard in medians and medians[best] > medians[guard]:
        best = guard
    return best, before, after
