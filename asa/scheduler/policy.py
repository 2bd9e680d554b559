"""Policy for acting on measurements."""

from __future__ import annotations

from asa.ir.codec import noun
from asa.ir.measurements import Measurements
from asa.ir.units import seconds


@noun
class Policy:
    """When to change the plan. ``min_gain``: relative gain below which a change is not worth its risk. ``confidence``:
    required share of what is expected to be saved in the sum of what is expected to be saved and to be lost. ``draws``:
    number of joint draws of the factors for it; ``model_error``: standard deviation of the ratio of two predictions, in
    addition to that of the factors. ``rebuild_s``: seconds of a change besides moving state, before one was timed.
    ``probation_steps``: steps after which a change is judged at the latest. ``cool_down``: steps without another change
    after one was undone, and at least ten times as long as that took; doubles each time, up to 16 times as many.
    ``probe_every``: number of observations between two
    probes of idle processes, or of links that the plan does not use; ``most_probing``: largest fraction of the time
    that probes may take. ``patience``: factor on the usual duration for which a difference must last before it is
    believed without other evidence. ``keep_batch_norm``: allow no plan that changes BatchNorm's group sizes.
    ``keep_plan``: report what is slow, but never change the plan."""

    min_gain: float = 0.03
    confidence: float = 0.9
    draws: int = 20
    model_error: float = 0.01
    rebuild_s: float = 1.0
    probation_steps: int = 20
    cool_down: int = 200
    probe_every: int = 2
    most_probing: float = 0.02
    patience: float = 1.0
    keep_batch_norm: bool = False
    keep_plan: bool = False


def describe(measured: Measurements, predicted_s: float | None = None) -> str:
    """Prediction and measurement in words; the error is predicted over measured, minus 1, as everywhere.

    ``predicted_s``: under costs corrected by earlier measurements; the plan's own prediction if None.

    >>> describe(measurements)  # doctest: +SKIP
    'predicted 742 ms a step, measured 751 ms (-1.2 %)'
    """
    predicted = measured.predicted_step_time_s if predicted_s is None else predicted_s
    actual = measured.step_time.median
    if predicted <= 0 or actual <= 0:
        return f"measured {seconds(actual)} a step, without a prediction"
    error = 100 * (predicted / actual - 1)
    return f"predicted {seconds(predicted)} a step, measured {seconds(actual)} ({error:+.1f} %)"
