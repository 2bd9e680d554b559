"""Least squares without a library: Levenberg-Marquardt, for models of a few dozen parameters and cheap residuals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.truth.downsets import Floats

_STEP = 1e-4
_MOST_STEPS = 60
_ENOUGH = 1e-7  # relative gain below which a step is the last


def least_squares(residuals: Callable[[Floats], Floats], start: Floats, *, prior: float) -> Floats:
    """The x near ``start`` that minimises ``sum residuals(x)^2 + prior^2 |x - start|^2``.

    With residuals of standard deviation ``prior`` and parameters scaled to their own, this is the most probable x.
    Marquardt, SIAM J. Appl. Math. 11 (1963): a step solves the normal equations with a share of their diagonal added,
    more after a step that did not help.
    """

    def everything(x: Floats) -> Floats:
        return np.concatenate((residuals(x), prior * (x - start)))

    x = np.array(start, dtype=np.float64)
    found, damping = everything(x), 1e-2
    for _ in range(_MOST_STEPS):
        jacobian = np.empty((len(found), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += _STEP
            jacobian[:, i] = (everything(moved) - found) / _STEP
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ found
        before = float(found @ found)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -gradient)
            trial = x + step
            after = everything(trial)
            if after @ after < before:
                break
            damping *= 4
        else:
            return x
        x, found, damping = trial, after, max(damping / 5, 1e-8)
        if before - found @ found < _ENOUGH * before:
            return x
    return x
