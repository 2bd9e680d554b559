"""Beliefs about the step times of some plans, updated by measurements, and where another measured step is worth most.

The logarithms of the step times are jointly normal. Prior: means and covariances of the joint draws of the errors of
costs (:mod:`asa.planner.answer.confidence`), an error common to all plans and one of each plan's own, for what no cost
foresees. Likelihood: in one round of turns every time carries its own noise and a drift that the plans of the round
share (the machine was slow just then), so the differences between plans are learned faster than their times.

    worth of a round with some plans = least mean now - expected least mean after it

which is the knowledge gradient for correlated beliefs (Frazier, Powell and Dayanik 2009), for the best of several
rounds of the same kind per round (Frazier and Powell 2010: a single one may be too little to change anything).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asa.ir.codec import noun

Round = Mapping[int, float]
"""Seconds per step of the plans that had a turn in it, by their index."""

COMMON = 0.3
"""Relative deviation of an error that all plans share: another machine state than the profile's."""
OWN = 0.06
"""Relative deviation of what a plan takes from what its costs can explain; near copies share it. Of 2,340 plans of the
regret records of November 2026 it was 0.05 to 0.09 around what the plans of a cell share, with what measuring adds."""
TIE = 0.01
"""Part of a step by which plans may be apart and both be the best: two runs of one plan come no closer."""
ALIKE, ALONE = 0.02, 0.1
"""Deviation of the ratio of two plans over the draws at which they share 1/e of what copies share; and what share of
the variance they do not share even then."""
NOISE, _DRIFT, _KNOWN = 0.03, 0.03, 4.0
"""Relative deviations of one step, on a machine that does not drift, and of one round before any was seen, and how many
observations that is worth."""
_CLIP = 3.0
"""Deviations beyond which a step is taken to be no further off than that: the median's robustness."""
_AHEAD = (1, 4, 16)
"""Rounds looked ahead."""
DRAWS = 4096
_SEED = 20250321


@noun
class Belief:
    """For each plan: the probability that it is the fastest, or as good as that (:data:`TIE`), and the expected loss
    against the fastest if it is chosen."""

    p_best: tuple[float, ...]
    expected_regret: tuple[float, ...]

    @property
    def best(self) -> int:
        """The plan to choose: the one with the least expected regret."""
        return min(range(len(self.expected_regret)), key=self.expected_regret.__getitem__)


def prior(draws: np.ndarray, own: float = OWN) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of the logarithms before anything is measured. ``draws`` as for :class:`Posterior`; ``own``
    is the deviation of each plan's own error."""
    logs = np.log(draws)
    apart = logs - logs.mean(axis=1, keepdims=True)
    distance = np.sqrt(((apart[:, None] - apart[None]) ** 2).mean(axis=2))
    errors = own**2 * ((1 - ALONE) * np.exp(-((distance / ALIKE) ** 2)) + ALONE * np.eye(len(logs)))
    return logs.mean(axis=1), np.atleast_2d(np.cov(logs)) + COMMON**2 + errors


def sample(mean: np.ndarray, covariance: np.ndarray, count: int) -> np.ndarray:
    """Joint draws, a row each, in pairs on both sides of the mean; the same ones every time."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    half = np.random.default_rng(_SEED).standard_normal((count // 2, len(mean)))
    return np.asarray(mean + np.concatenate((half, -half)) @ root.T)


class Posterior:
    """Beliefs after some rounds. ``draws``: seconds of a step, a row for each plan and a column for each joint draw;
    ``noise``: the relative deviation of one step that is expected before any was measured."""

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
        """The belief over joint draws, the same for the same rounds."""
        times = np.exp(sample(self.mean, self.covariance, DRAWS))
        fastest = times.min(axis=1, keepdims=True)
        return Belief(
            p_best=tuple(float(x) for x in (times <= fastest * (1 + TIE)).mean(axis=0)),
            expected_regret=tuple(float(x) for x in (times / fastest - 1).mean(axis=0)),
        )

    def worth(self, plans: Sequence[int]) -> float:
        """The share of a step by which one more round with a turn for each of ``plans`` is expected to lower the chosen
        time."""
        chosen, best = sorted(set(plans)), 0.0
        for times in _AHEAD:
            gain = self._gain(chosen, times)
            moved = gain @ self.covariance[chosen]
            means = sample(self.mean, (moved + moved.T) / 2, DRAWS // 4)
            best = max(best, float(self.mean.min() - means.min(axis=1).mean()) / times)
        return best


def _spread(rounds: list[dict[int, float]], expected: float) -> tuple[float, float, list[dict[int, float]]]:
    """Deviation of a step, deviation of a round, and the rounds with outliers drawn in. ``expected``: the first, before
    any step was measured.

    The model is two-way: a time is its plan's median, its round's offset, and noise.
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
    """A policy that says which plans have a turn next. ``draws`` as for :class:`Posterior`; the plans of ``always``
    come first.

    Every plan has one turn beside the first of ``always`` before any has a second. Measuring ends when the expected
    regret of the choice is below ``enough`` and the plans of ``always`` and the choice have had ``least`` turns.
    ``noise`` is that of :class:`Posterior`: where steps are noisy and a few of them look alike by chance, measuring
    goes on.
    """

    draws: tuple[tuple[float, ...], ...]
    always: tuple[int, ...]
    enough: float = 0.005
    least: int = 3
    noise: float = NOISE

    def next(self, rounds: Sequence[Round], left_s: float, build_s: float = 0.0) -> tuple[int, ...]:
        """The plans of the next round; none where measuring is to end.

        ``left_s``: seconds that may still be spent; ``build_s``: seconds that a plan needs before its first turn.
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
