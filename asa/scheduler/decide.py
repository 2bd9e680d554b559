"""Decisions of the leading rank after each window of steps: corrected costs, findings, and whether another plan pays.

Another plan is searched for when the factors have changed since the last search. Both plans are priced under the same
factors, and the gain is their relative difference times the measured step, so a uniform slow-down gives no gain. Since
it is unknown how long a disturbance will last, a change waits until the time lost so far equals its cost (ski rental:
at most twice the cost of the best decision in hindsight). What was lost by leaving the present plan before is added to
that cost, so a machine that alternates is not followed where that loses time. The change is then made if, over joint
draws of the factors, enough of what is at stake is time saved over the remaining steps. A change that proves wrong is
undone after a trial, which limits what it can lose.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from asa.errors import AsaError
from asa.interfaces.executor import Placement, Probe
from asa.ir.codec import fingerprint
from asa.ir.measurements import Measurements
from asa.ir.units import seconds
from asa.scheduler import norms
from asa.scheduler.cores import Cores
from asa.scheduler.costs import LIKE, MIN_STEPS, Costs, Slowness, own_s, sharing_shift, spread, typical
from asa.scheduler.expected import Expected
from asa.scheduler.experience import Departures, Experience
from asa.scheduler.exposed import Exposed
from asa.scheduler.findings import Finding, Findings, finite, impossible_figures
from asa.scheduler.lasting import Lasting
from asa.scheduler.model import Answer, Asked, Model, Question, rung, same
from asa.scheduler.policy import Policy

_CLEAR = 5
"""Smallest number of steps after which a change is judged if its effect is clear."""
_BEYOND_DOUBT, _SURE = 0.10, 3.0
"""Smallest change of a step's time whose effect counts as clear: as a fraction, and in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of plan: ``kind`` is ``switch`` or ``rollback``; ``step_s``: measured before it, ``promised_s``:
    predicted for the new plan in the same circumstances, ``cost_s``: predicted seconds of the change itself."""

    target: Placement
    before: Placement
    kind: str
    why: str
    rung: str
    step_s: float
    promised_s: float
    cost_s: float
    batch_norm: str = ""

    @property
    def gain(self) -> float:
        """Predicted gain as a fraction of a step."""
        return 1 - self.promised_s / self.step_s


@dataclass(kw_only=True)
class _Option:
    """Another plan that seems faster: seconds lost without it so far, and over how many steps; ``owed``: steps before
    the search that count as lost, too, because the slow-down was already measured in them."""

    target: Placement
    ratio: float
    cost_s: float
    lost_s: float = 0.0
    steps: int = 0
    owed: int = MIN_STEPS
    asked_at: int = 0


class _Recent:
    """The newest steps under one plan in one state of the machine, about ``most`` of them: those before and after a
    change are compared to judge it. Steps during a search are left out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._slowness: Slowness | None = None
        self._windows: deque[tuple[int, float]] = deque()
        self.num_since = 0
        """Number of steps since the state of the machine was known."""

    @property
    def typical(self) -> tuple[int, float]:
        """Number of steps, and typical seconds of one: their mean, in which the longest tenth counts as the next
        shorter step, because a window of one long step may be chance."""
        each = sorted(s for n, s in self._windows for _ in range(n))
        most = each[int(0.9 * (len(each) - 1))] if each else 0.0
        return len(each), sum(min(s, most) for s in each) / max(1, len(each))

    def window(self, measured: Measurements, steps: int, slowness: Slowness) -> tuple[int, float] | None:
        """Add a window of ``steps`` steps. Another ``slowness`` discards all earlier ones, and this one if some of its
        steps are about as fast as those. It is known some windows late, so the last ones stay that are like this one.
        Returns :attr:`typical` of those before, or of all if all are like it."""
        discarded = None
        if self._slowness is None or slowness.distance(self._slowness) > LIKE:
            of_all, like = self.typical, self._last_like(typical(measured))
            discarded = None if self._slowness is None else self.typical if self._windows else of_all
            self._slowness, self.num_since = slowness, 0
            self._windows.clear()
            self._windows.extend(like)
            if discarded and discarded[0]:
                smaller, larger = sorted(
                    abs(math.log(s / discarded[1])) for s in (measured.step_time.p10, measured.step_time.p90)
                )
                if larger > LIKE and smaller < larger / 2:
                    return discarded
        self._windows.append((steps, typical(measured)))
        self.num_since += steps
        while self.typical[0] - self._windows[0][0] >= self._most:
            self._windows.popleft()
        return discarded

    def _last_like(self, step_s: float) -> list[tuple[int, float]]:
        """Remove and return the last windows with steps of about ``step_s`` seconds."""
        windows = list(self._windows)
        first = len(windows)
        while first and abs(math.log(windows[first - 1][1] / step_s)) <= LIKE:
            first -= 1
        self._windows = deque(windows[:first])
        return windows[first:]


class Decider:
    """State of the leading rank, for ``processes`` processes.

    After each window: ``found``, findings; ``events`` on decisions; ``reason`` in words; ``predicted_s``, the
    corrected prediction with which the window is compared; and ``bound``, the largest fraction of a step that any plan
    could still save, as proved by the last search under the corrected costs.
    """

    def __init__(self, model: Model, processes: int, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self.costs = Costs(processes, len(model.cluster.levels))
        self.found: list[Finding] = []
        self.events: list[dict[str, Any]] = []
        self.reason = ""
        self.predicted_s: float | None = None
        self.bound = 0.0
        self._solved = self.costs.slowness()
        self._findings = Findings(model.cluster, self._solved, lasting=Lasting(policy.patience))
        self._causes: dict[tuple[str, int | None], str] = {}
        self._groups = Cores()
        self._exposed = Exposed(model.step_s)
        self._option: _Option | None = None
        self._trial: Change | None = None
        self._recent = _Recent(policy.probation_steps)
        self._experience = Experience()
        self._departures, self._uncompared = Departures(), (0, 0.0)
        """The second: steps and seconds that are not compared with other plans yet."""
        self._compared: tuple[Placement, Slowness, list[float]] | None = None
        self._quiet, self._next_quiet = 0, policy.cool_down
        self._latest = self._failed_under = self._changed_under = self._solved
        self._least_lasting = 0
        """Number of steps that another state must last to end the pause after a change that did not help."""
        self._retry_in: int | None = None
        """Number of steps after which to search again, though no factor has changed; None for never."""
        self._rebuild_s = policy.rebuild_s
        self._expected: tuple[Placement, Expected] | None = None
        self._last_price: tuple[Placement, Slowness, float] | None = None
        self._next_s: float | None = None
        self._windows = 0
        self._background_search: tuple[Asked, Slowness] | None = None
        self._uncounted_steps = 0
        self._answer: tuple[Answer, Slowness] | None = None
        """The last answer of a search during training, and the factors that it was asked for."""
        self._search_failed = self._heavy = False
        """Whether the last search found no answer, and whether more memory was needed than any search allowed for."""
        self._peaks: tuple[Placement, tuple[int, ...]] | None = None

    def memory(self, current: Placement, measured: Measurements) -> list[Finding]:
        """Findings on the memory that ``current`` has needed so far, if that was measured. The next window begins a
        search for a plan that allows for it."""
        if measured.peak_memory_bytes is None or measured.plan_fingerprint != fingerprint(current.plan):
            return []
        self._peaks = current, measured.peak_memory_bytes
        heavy = self._findings.memory(measured, current)
        self._heavy = self._heavy or bool(heavy)
        self._note_causes(heavy)
        return heavy

    def _note_causes(self, findings: list[Finding]) -> None:
        """Remember the newest word on every cause for which a plan can be changed."""
        for f in findings:
            if f.cause not in ("data", "figures"):
                key = "compute" if f.cause == "everything" else f.cause, f.where  # one word on all ranks, the last
                if f.ended and key in self._causes:  # it began and ended under this plan
                    del self._causes[key]
                else:
                    self._causes[key] = f.line

    def window(
        self, current: Placement, measured: Measurements, *, steps: int, left: int | None, probe: Probe | None = None
    ) -> Change | None:
        """Process a window of ``steps`` steps under ``current``, with ``left`` steps before the end (None: unknown);
        returns the change to make, if any."""
        self.found, self.events, self._windows = [], [], self._windows + 1
        bad = impossible_figures(measured)
        measured = measured if -1 in bad else finite(measured)
        silent = [p for p in current.processes if -1 not in bad and measured.per_rank and own_s(measured, p) == 0]
        bad = dict.fromkeys(silent, "it reports none") | bad
        self.found += self._findings.ignored.window(bad)
        if -1 in bad:
            return None
        steps = max(1, min(steps, measured.step_time.n))
        if self._background_search is not None:  # the search uses the cores, so these steps are not representative
            self._uncounted_steps += steps
            self._ask(*self._background_search, current)
            return None
        expected = self._expectation(current)
        exposed = self._exposed.level(current, measured, expected, self.costs.slowness(), steps)
        self.costs.observe(measured, expected, current.processes, steps, bad, exposed)
        if probe is not None:
            self.costs.probed(probe, current.processes, expected, steps)
        factor = self.costs.step_factor
        self.predicted_s, self._next_s = self._next_s, expected.step_s * factor.ratio if factor.known else self._next_s
        self._groups.window(measured, steps)
        slowness = self._credible(current, measured, self._slowness(current))
        self.found += self.memory(current, measured)
        self.found += self._findings.waiting_for_data(measured) + self._findings.sharing(self._groups.current)
        if any(f.known for f in self.costs.ranks):
            self.found += self._findings.slow(
                slowness, measured, expected, current.processes, by_rank=self.costs.by_rank, steps=steps,
                doubts=self.costs.doubts(),
            )  # fmt: skip
            planned = self._findings.planned  # short disturbances do not change a plan
            slowness = replace(slowness, common=planned.common, ranks=planned.ranks, levels=planned.levels)
        self._note_causes(self.found)
        self._latest = slowness
        self._compare(current, steps, typical(measured), slowness)
        previous_state = self._recent.window(measured, steps, slowness)
        if self._trial is not None:
            return self._review(self._trial, measured, previous_state, left)
        if left == 0 or self.policy.keep_plan:
            return None
        lasts = self._recent.num_since >= self._least_lasting
        self._retry_in = None if self._retry_in is None else self._retry_in - steps
        if self._quiet > 0 and not (lasts and slowness.imbalance(self._failed_under) > _SIMILAR):
            self._quiet -= steps
            if slowness.distance(self._solved) > LIKE:
                self.reason = "waiting after a change that did not help"
            return None
        if self._groups.established != self._groups.current:  # the times of ranks are not known yet
            return None
        changed = slowness.distance(self._solved) > LIKE and not self._repriced(current, slowness)
        outdated = changed or (self._retry_in is not None and self._retry_in <= 0)
        steps, self._uncounted_steps = steps + self._uncounted_steps, 0
        if (outdated or self._heavy) and not self._search(current, measured, slowness):
            self._uncounted_steps = steps
            return None
        return self._weigh(current, measured, slowness, steps, left)

    def _compare(self, current: Placement, steps: int, step_s: float, slowness: Slowness) -> None:
        """Compare ``steps`` steps of ``step_s`` seconds with what they would have taken under the plans that were left.
        Steps that ``slowness`` does not explain wait: the machine has changed, and it is not known yet how."""
        if not self._departures.plans:
            return
        held, held_s = self._uncompared
        self._uncompared = held, held_s = held + steps, held_s + steps * step_s
        if held < 2 * MIN_STEPS and abs(math.log(step_s / self._price(current, slowness))) > _SIMILAR:
            return
        self._uncompared, last = (0, 0.0), self._compared
        if last is None or not same(last[0], current) or slowness.distance(last[1]) > _SAME:
            self._compared = last = (
                current, slowness, [self._ratio(p, current, slowness) for p in self._departures.plans],
            )  # fmt: skip
        self._departures.ran(current, held_s, last[2])

    def _repriced(self, current: Placement, slowness: Slowness) -> bool:
        """Whether the other plan still pays under ``slowness``, which differs little from what it was found for. It is
        then changed to first, and searched for again after that."""
        option = self._option
        if option is None or slowness.distance(self._solved) > _SIMILAR:
            return False
        ratio = self._ratio(option.target, current, slowness)
        if 1 - ratio < self.policy.min_gain:
            return False
        option.ratio = ratio
        return True

    def _ask(self, search: Asked, slowness: Slowness, current: Placement) -> None:
        """Ask a search that runs during training for its answer. A change to the plan that it finds waits for the next
        window, whose steps show whether ``slowness``, with which the search began, has ended meanwhile."""
        answer, failed = None, ""
        try:
            answer = search.result()
            if answer is None:
                return
        except Exception as error:
            failed = _failure(error)
        self._background_search, self._search_failed = None, answer is None
        self._answer = None if answer is None else (answer, slowness)
        self._choose(current, slowness, [] if answer is None else answer.found, failed)

    def close(self) -> None:
        """Stop a search that is still running. If the run goes on after all, it is repeated."""
        if self._background_search is not None:
            self._background_search[0].stop()
            self._background_search, self._retry_in = None, 0

    def corrected(self, current: Placement) -> Slowness:
        """All estimates, including the residual of the step under ``current``."""
        slowness = self._slowness(current)
        if not self.costs.step_factor.known:
            return slowness
        step_s = self._expectation(current).step_s * self.costs.step_factor.ratio
        return replace(slowness, residual=math.log(step_s / self._price(current, slowness)))

    def _slowness(self, current: Placement) -> Slowness:
        sharing = tuple((g, sum(p in g for p in current.processes)) for g in self._groups.established)
        return replace(self.costs.slowness(), sharing=sharing)

    def _expectation(self, current: Placement) -> Expected:
        if self._expected is None or not same(self._expected[0], current):
            self._expected = current, self.model.expected(current.plan, current.processes)
        return self._expected[1]

    def _price(self, current: Placement, slowness: Slowness) -> float:
        last = self._last_price
        if last is None or not same(last[0], current) or slowness.distance(last[1]) > _SAME:
            self._last_price = last = current, slowness, self.model.step_s(current, slowness)
        return last[2]

    def _credible(self, current: Placement, measured: Measurements, slowness: Slowness) -> Slowness:
        """``slowness``, unless links seem slower (or faster) than the step time confirms.

        A transfer during computation takes longer than the tables say, which were measured without computation. If the
        step time is explained better without this slow-down, it is subtracted from now on. A transfer that became
        faster is accepted unless the step time contradicts it.
        """
        solved = self._solved.levels
        differ = {i for i, (a, b) in enumerate(zip(slowness.levels, solved, strict=True)) if abs(a - b) > LIKE}
        if differ <= self.costs.probed_levels:  # a plan that hardly uses a link does not show how fast it is
            return slowness
        unchanged, expected = replace(slowness, levels=solved), self._expectation(current)
        logs = [math.log(self.model.step_s(current, s)) for s in (slowness, unchanged)]
        worse = any(
            now - old > LIKE and abs(now - slowness.common) > LIKE
            for now, old in zip(slowness.levels, solved, strict=True)
        )
        if worse and logs[0] - logs[1] < self.policy.min_gain:  # too small a loss to report
            return unchanged
        accept = self._exposed.clearly_closer(current, measured, expected, slowness, unchanged)
        if accept is None:
            pace = self.costs.step_factor
            last = math.log(typical(measured) / expected.step_s)
            if pace.doubtful or (not worse and abs(last - pace.mean) > LIKE / 2):
                return unchanged  # the step time changes, too; the next window shows by how much
            measured_log = math.log(expected.step_s * pace.ratio if pace.known else typical(measured))
            errors = [abs(measured_log - log) for log in logs]
            changed = max(abs(a - b) for a, b in zip(slowness.levels, solved, strict=True))
            by_overlap = math.log(self.model.cluster.overlap.communication_slowdown) + LIKE
            # If the step time shows nothing, allow for the slow-down of a transfer by computation.
            accept = errors[1] + _VISIBLE >= errors[0] and (errors[1] > errors[0] + _VISIBLE or changed > by_overlap)
        if accept:
            return slowness
        for level, (now, old) in enumerate(zip(slowness.levels, solved, strict=True)):
            if now - old > LIKE:  # a transfer never looks too fast, and the step time may follow in the next window
                factor = self.costs.levels[level]
                self.costs.biases[level] += factor.mean - old
                self.costs.levels[level] = replace(factor, mean=old)
        return unchanged

    def _search(self, current: Placement, measured: Measurements, slowness: Slowness) -> bool:
        """Search for a faster plan under ``slowness``. Returns False if the search runs during training and answers
        later."""
        self._solved, self._retry_in, self._heavy, self._search_failed = slowness, None, False, False
        if self._peaks is not None and same(self._peaks[0], current):
            measured = replace(measured, peak_memory_bytes=self._peaks[1])
        solved: list[Placement] = []
        failed = ""
        try:
            if self.model.background is not None:
                question = Question(
                    current=current, known=tuple(self._experience.others(current)), measured=measured,
                    slowness=slowness, deviations=self.costs.deviations(), draws=self.policy.draws, seed=self._windows,
                )  # fmt: skip
                self._background_search = self.model.background(question), slowness
                return False
            solved = self.model.best(current, measured, slowness)
        except Exception as error:
            failed = _failure(error)
        self._choose(current, slowness, solved, failed)
        return True

    def _choose(self, current: Placement, slowness: Slowness, solved: list[Placement], failed: str) -> None:
        """Choose the fastest plan under ``slowness`` among ``solved`` and those that ran before."""
        previous, self._option = self._option, None
        earlier = self._experience.add(current)
        if solved:
            self.bound = max(0.0, 1 - solved[0].plan.certificate.lower_bound_s / self._price(current, slowness))
        options = [p for p in (*earlier, *solved) if not same(p, current)]
        left_out = ""
        if self.policy.keep_batch_norm:
            allowed = [p for p in options if not self._norms(current, p)]
            left_out = "" if len(allowed) == len(options) else "; plans with other groups for BatchNorm are left out"
            options = allowed
        ratios = [self._ratio(p, current, slowness) for p in options]
        without = [ratio * math.exp(-self._experience.penalty(p)) for p, ratio in zip(options, ratios, strict=True)]
        self._experience.searched()
        best = min(range(len(options)), key=ratios.__getitem__, default=None)
        if best is None or 1 - ratios[best] < self.policy.min_gain:
            if without and 1 - min(without) >= self.policy.min_gain:  # it may have failed for a reason that is over
                self._retry_in = self.policy.cool_down
            why = failed or "solved again: this plan stays the best"
            self._announce("keep", f"{why}{left_out}")
            return
        # Of equally fast plans, prefer one that ran before.
        best = next(i for i, r in enumerate(ratios) if r <= ratios[best] * (1 + _SAME))
        target = options[best]
        cost_s = self._rebuild_s + self.model.move_s(current, target, slowness)
        self._option = _Option(target=target, ratio=ratios[best], cost_s=cost_s)
        if previous is not None:  # time lost so far also counts for a similar plan
            self._option.lost_s, self._option.steps, self._option.owed = previous.lost_s, previous.steps, previous.owed

    def _weigh(
        self, current: Placement, measured: Measurements, slowness: Slowness, steps: int, left: int | None
    ) -> Change | None:
        """The change to the other plan, if the time lost so far justifies it; otherwise None."""
        option = self._option
        if option is None:
            return None
        num_steps, step_s = self._recent.typical
        # Steps before the machine's state was known count if they confirm it.
        unexplained = abs(math.log(step_s / self._price(current, slowness))) > _SIMILAR if num_steps else True
        num_steps = self._recent.num_since if unexplained else num_steps
        doubted = any(2 * f.doubtful >= MIN_STEPS for f in self.costs.ranks)
        if num_steps < MIN_STEPS or doubted or typical(measured) < step_s * math.exp(-LIKE):  # it may be over
            option.owed += steps
            self.reason = "another plan is faster; the present one is measured first"
            return None
        cost_s = option.cost_s
        gain_s = (1 - option.ratio) * step_s
        steps, option.owed = steps + option.owed, 0
        option.lost_s, option.steps = option.lost_s + steps * gain_s, option.steps + steps
        if left is not None and gain_s * left <= cost_s:
            self._wait(
                option, f"{left} steps are left: {seconds(gain_s * left)} to gain for a change of {seconds(cost_s)}"
            )
            return None
        before_s = self._departures.lost_s(current)
        if option.lost_s < cost_s + before_s:
            before = f", leaving this plan before lost {seconds(before_s)}" if before_s else ""
            self._wait(option, f"a change costs {seconds(cost_s)}{before}, {seconds(option.lost_s)} were lost so far")
            return None
        if option.steps < 2 * option.asked_at:  # the result would hardly differ from the last one
            return None
        drawn = self._answer is not None or self._search_failed or self.model.background is None
        if not drawn and not self._search(current, measured, slowness):
            self._uncounted_steps = 0
            return None
        horizon = option.steps if left is None else left
        saved_s, lost_s = self._stakes(current, option, slowness, step_s, horizon)
        if saved_s <= 0 or saved_s < self.policy.confidence * (saved_s + lost_s):
            option.asked_at = option.steps
            gain = f"another plan would save {100 * (1 - option.ratio):.1f} % of a step"
            self._announce("keep", f"{gain}; expected: {seconds(saved_s)} saved or {seconds(lost_s)} lost")
            return None
        why = "; ".join(self._causes.values()) or "another plan is faster under the costs as measured"
        self._option, self._causes = None, {}
        return Change(
            target=option.target,
            before=current,
            kind="switch",
            why=why,
            rung=rung(current, option.target),
            step_s=step_s,
            promised_s=option.ratio * step_s,
            cost_s=cost_s,
            batch_norm=self._norms(current, option.target),
        )

    def _stakes(
        self, current: Placement, option: _Option, slowness: Slowness, step_s: float, horizon: int
    ) -> tuple[float, float]:  # fmt: skip
        """Expected seconds that the change saves over ``horizon`` steps, and that it loses, over joint draws of the
        factors. A draw in which steps become slower loses those of a trial, and two changes."""
        policy, seed = self.policy, self._windows
        noise = random.Random(-seed)
        drawn, self._answer, pair = self._answer, None, (current, option.target)
        if drawn is None:
            draws = self.model.draws(self.costs.deviations(), slowness, pair, policy.draws, seed)
        else:
            answer, slowness = drawn
            now_at, other_at = (next(i for i, p in enumerate(answer.placements) if same(p, q)) for q in pair)
            draws = [(row[now_at], row[other_at]) for row in answer.draws]
        base = option.ratio * self.model.step_s(current, slowness) / self.model.step_s(option.target, slowness)
        doubt, saved_s, lost_s = self._untried(current, option.target, slowness), 0.0, 0.0
        base, error = base * math.exp(doubt), math.hypot(policy.model_error, doubt)
        for current_s, target_s in draws:
            ratio = base * target_s / current_s * math.exp(noise.gauss(0, error))
            gain_s, trial = (1 - ratio) * step_s, min(horizon, policy.probation_steps)
            if gain_s >= 0:
                net_s = gain_s * horizon - option.cost_s
            else:
                net_s = gain_s * trial - 2 * option.cost_s
            saved_s, lost_s = saved_s + max(0.0, net_s), lost_s + max(0.0, -net_s)
        return saved_s / len(draws), lost_s / len(draws)

    def _untried(self, current: Placement, target: Placement, slowness: Slowness) -> float:
        """Uncertainty, as a logarithm, of the price of a plan for other ranks that never ran here. It is above 0 if all
        ranks are faster than predicted: either the machine is faster, or only the current plan."""
        other_ranks = rung(current, target) in ("fewer", "more")
        return max(0.0, -slowness.common) / 2 if other_ranks and not self._experience.has_run(target) else 0.0

    def _review(
        self, change: Change, measured: Measurements, ended: tuple[int, float] | None, left: int | None
    ) -> Change | None:
        """Judge a change after its first steps; returns its rollback if it did not help, and ``left`` steps are enough
        to make up for another change. ``ended``: steps under it, and seconds of one, before the machine became slower
        or faster in this window; they decide if they are enough."""
        over = ended is not None and ended[0] >= _CLEAR
        steps, now = ended if ended and over else self._recent.typical
        gain = 1 - now / change.step_s
        variance = spread(measured) * (1 / max(1, steps) + 1 / self.policy.probation_steps)
        clear = steps >= _CLEAR and abs(gain) >= max(_BEYOND_DOUBT, _SURE * math.sqrt(variance))
        if steps < self.policy.probation_steps and not clear and not over:
            return None
        self._trial = None
        self.events.append(
            {"event": "replan", "kind": "outcome", "predicted_gain": change.gain, "measured_gain": gain}
        )  # fmt: skip
        changed = 0.0 if over else self._changed_since(change)
        error = math.log(now / change.promised_s) - changed
        if gain >= 0:
            self._experience.learn(change.target.plan, error)
            self._quiet, self._next_quiet = 0, self.policy.cool_down
            self.reason = f"the new plan saves {100 * gain:.1f} % of a step"
            return None
        slower = f"{seconds(now)} a step after the change, {seconds(change.step_s)} before"
        self._experience.failed(change.target, error)
        if changed > LIKE:
            self._least_lasting = _LASTS * self.policy.probation_steps
        if left is not None and (now - change.step_s) * left <= change.cost_s:
            self.reason = f"{slower}; {left} steps are left, too few to change back"
            return None
        return Change(
            target=change.before,
            before=change.target,
            kind="rollback",
            why=slower,
            rung=rung(change.target, change.before),
            step_s=now,
            promised_s=change.step_s,
            cost_s=change.cost_s,
        )

    def _changed_since(self, change: Change) -> float:
        """Logarithm of how much slower the new plan should be than at ``change``, because ranks or links have become
        slower since then, relative to what is common to all."""
        now = replace(self._latest, common=self._changed_under.common)
        prices = [self.model.step_s(change.target, slowness) for slowness in (now, self._changed_under)]
        return math.log(prices[0] / prices[1])

    def moved(self, change: Change, took_s: float, state_s: float | None = None) -> None:
        """Record that ``change`` was made in ``took_s`` seconds, ``state_s`` of them (if timed) for state."""
        if state_s is None:
            state_s = max(0.0, change.cost_s - self._rebuild_s)
        self._rebuild_s = max(0.0, took_s - state_s)
        self._departures.moved(change.before, change.target, took_s)
        self._uncompared, self._compared = (0, 0.0), None
        self.costs.moved()
        for group in self._groups.established:
            self.costs.shift_group(
                group, sharing_shift(group, change.target.processes, sum(p in group for p in change.before.processes))
            )
        if self._groups.established:  # ranks that share a core now have a larger or smaller part of it
            self._findings.take_for_granted(self.costs.slowness())
        self._next_s = change.promised_s
        self.bound = max(0.0, 1 - (1 - self.bound) * change.step_s / change.promised_s)
        self._recent = _Recent(self.policy.probation_steps)
        if change.kind == "rollback":
            self._pause(_REST * change.cost_s / change.promised_s)
            self.reason = f"rolled back: {change.why}"
        else:
            self._trial, self._changed_under = change, self._latest
            self.reason = change.why

    def failed(self) -> None:
        """Record that an agreed change could not be made, so that the current plan stays."""
        self._pause()
        self._trial = None

    def _pause(self, least: float = 0.0) -> None:
        """Make no change for a while, ``least`` steps or more, the next time for twice as long (up to a limit), and
        then search again."""
        times = self._next_quiet / max(1, self.policy.cool_down)
        self._retry_in = self._quiet = max(self._next_quiet, int(times * least))
        self._next_quiet = min(2 * self._next_quiet, _LONGEST_PAUSE * self.policy.cool_down)
        self._failed_under = self._latest

    def _ratio(self, target: Placement, current: Placement, slowness: Slowness) -> float:
        """Step time of ``target`` over that of ``current`` under ``slowness``, by their prices and by what was measured
        after changes to them."""
        known = self._experience
        prices = self.model.step_s(target, slowness) / self._price(current, slowness)
        return prices * math.exp(known.penalty(target) + known.bias(target.plan) - known.bias(current.plan))

    def _norms(self, old: Placement, new: Placement) -> str:
        return norms.changed(old.plan, new.plan, self.model.profile.graph)

    def _announce(self, kind: str, why: str) -> None:
        self.reason = why
        self.events.append({"event": "replan", "kind": kind, "why": why})

    def _wait(self, option: _Option, why: str) -> None:
        """Announce once that the change waits, and keep the reason up to date."""
        if not option.asked_at:
            option.asked_at = 1
            self._announce("wait", why)
        self.reason = why


_LONGEST_PAUSE = 16
"""Multiple of the first pause after a change that did not help, beyond which pauses do not grow."""
_REST = 10
"""Multiple of the time of a change that did not help, for which no other is made at least: where steps are short, a
number of steps alone would be less than the time of the change itself."""
_LASTS = 3
"""Multiple of the steps of a trial for which a state must last to end a pause, if the machine changed in a trial."""
_VISIBLE = 0.01
"""Smallest difference of the logarithms of two step times that can be measured."""
_SIMILAR = math.log(1.25)
"""Difference of factors up to which a plan that was found, but not yet changed to, is priced again instead of searched
for again; of a measured step from its price up to which the factors explain it; and of ranks or levels up to which no
other plan is tried for a while after a change that did not help."""
_SAME = 0.005
"""Difference of factors below which a plan is not priced again, and of times that count as equal."""


def _failure(error: Exception) -> str:
    """What is announced of a search that failed. It does not end training, whatever the error."""
    broken = "" if isinstance(error, AsaError) else f"the search broke with {type(error).__name__}: "
    return f"no other plan: {broken}{error}"
