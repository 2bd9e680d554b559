"""Was the plan's promise kept, and if not: could another plan do better, and would changing to it pay?"""

from __future__ import annotations

from asa.ir.codec import noun
from asa.ir.measurements import Measurements, Verdict
from asa.ir.plan import Plan
from asa.ir.units import binary


@noun
class Policy:
    """When to act. ``tolerance``: relative error of a prediction that is nobody's business. ``min_gain``: relative
    gain below which a change is not worth its risk. ``min_steps``: measured steps below which nothing is concluded.
    ``migration_s``: what a change costs before one was ever timed. ``cool_down``: epochs without another change
    after one was taken back; doubles each time.
    """

    tolerance: float = 0.10
    min_gain: float = 0.02
    min_steps: int = 5
    migration_s: float = 10.0
    cool_down: int = 1


def describe(measured: Measurements) -> str:
    """Predicted against measured, in words; the error is predicted over measured, less one, as everywhere.

    >>> describe(measurements)  # doctest: +SKIP
    'predicted 0.742 s/step, measured 0.751 s (-1.2 %)'
    """
    predicted, actual = measured.predicted_step_time_s, measured.step_time.median
    if predicted <= 0 or actual <= 0:
        return f"measured {_seconds(actual)}/step, without a prediction"
    error = 100 * (predicted / actual - 1)
    return f"predicted {_seconds(predicted)}/step, measured {_seconds(actual)} ({error:+.1f} %)"


def judge(measured: Measurements, plan: Plan, policy: Policy) -> Verdict:
    """Whether to solve again after an epoch under ``plan``.

    ``best_possible_gain`` is the most any plan of the certified space could save of a step, if nothing but this
    plan's own prediction were wrong: 1 - lower bound / measured. It is an upper limit, not a forecast: whatever
    slowed this plan down may slow the others as well.
    """
    actual, predicted = measured.step_time.median, measured.predicted_step_time_s
    gain = max(0.0, 1 - plan.certificate.lower_bound_s / actual) if actual > 0 else 0.0
    action, why = _decide(measured, plan, policy, gain)
    return Verdict(
        action="replan" if action else "keep",
        reason=describe(measured) + (f": {why}" if why else ""),
        measured_s=actual,
        predicted_s=predicted,
        best_possible_gain=gain,
    )


def _decide(measured: Measurements, plan: Plan, policy: Policy, gain: float) -> tuple[bool, str]:
    """Whether to solve again, and the figure that decides."""
    time, promise = measured.step_time, plan.prediction
    for rank, (used, promised) in enumerate(
        zip(measured.peak_memory_bytes or (), measured.predicted_memory_bytes, strict=False)
    ):
        if used > promised > 0:
            return True, f"rank {rank} needs {binary(used)} where {binary(promised)} were promised"
    if time.n < policy.min_steps:
        return False, f"too few steps to tell ({time.n} of {policy.min_steps})"
    if measured.predicted_step_time_s <= 0:
        return True, "nothing was predicted"
    error = time.median / measured.predicted_step_time_s - 1
    # Outside the promised range, by more than the steps themselves spread.
    outside = time.p10 > promise.step_time_high_s or time.p90 < promise.step_time_low_s
    if abs(error) <= policy.tolerance or not outside:
        return False, ""
    if gain < policy.min_gain:
        return False, f"but another plan could gain at most {100 * gain:.1f} %"
    pace = "slower" if error > 0 else "faster"
    return True, f"{pace} than promised; another plan could gain up to {100 * gain:.0f} %"


def worthwhile(candidate: Plan, measured: Measurements, *, steps_left: int, cost_s: float, policy: Policy) -> str:
    """Why changing to ``candidate`` does not pay; empty when it does.

    ``candidate.prediction`` is under costs already corrected by what was measured. ``cost_s``: of the change itself.
    """
    actual, promised = measured.step_time.median, candidate.prediction.step_time_s
    gain = actual - promised
    if candidate.num_ranks != measured.num_ranks:
        return f"the better plan uses {candidate.num_ranks} ranks, this run has {measured.num_ranks}"
    if gain < policy.min_gain * actual:
        return f"the best plan found would take {_seconds(promised)}/step against {_seconds(actual)}"
    if gain * steps_left <= cost_s:
        return f"{steps_left} steps are left: {_seconds(gain * steps_left)} to gain for a change of {_seconds(cost_s)}"
    return ""


def _seconds(value: float) -> str:
    """Three significant digits, without an exponent.

    >>> [_seconds(v) for v in (0.7421, 12.34, 0.00012)]
    ['0.742 s', '12.3 s', '0.00012 s']
    """
    text = f"{value:.3g}"
    return f"{float(text):.10f}".rstrip("0").rstrip(".") + " s" if "e" in text else f"{text} s"
