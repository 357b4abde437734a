"""Robust regression with non-negative coefficients, on relative errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HUBER = 1.345
"""Residuals beyond so many standard deviations lose weight: 95% efficient on normal errors."""
MAD_TO_DEVIATION = 1.4826
ITERATIONS = 30
SMALLEST_SHARE = 0.05
"""A fit below this share of the target counts as this share."""


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The ``x >= 0`` that minimises ``|matrix x - target|``, by the active-set method of Lawson and Hanson.

    ``matrix`` is (rows, columns), ``target`` (rows,).
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    x = np.zeros(count)
    passive = np.zeros(count, bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ target).max(initial=0.0)))
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= tolerance:
            break
        passive[entering] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if trial[passive].min() > 0:
                break
            leaving = passive & (trial <= 0)
            steps = x[leaving] / (x[leaving] - trial[leaving])
            x = x + float(steps.min()) * (trial - x)
            passive &= x > tolerance
            x[~passive] = 0.0
            if not passive.any():
                trial = np.zeros(count)
                break
        x = trial
    return x / scale


def robust_fit(matrix: Floats, target: Floats) -> Floats:
    """Non-negative coefficients that fit positive ``target`` by error relative to the fit, outliers weighed down (Huber).

    Relative to the fit and not to the target, so that noise, which only ever adds time, does not pull the fit down.
    """
    size, weights = target, np.ones(len(target))
    x = np.zeros(matrix.shape[1])
    for _ in range(ITERATIONS):
        root = np.sqrt(weights)
        new = nonnegative_least_squares(matrix * (root / size)[:, None], target * root / size)
        predicted = np.maximum(matrix @ new, SMALLEST_SHARE * target)
        residual = target / predicted - 1
        deviation = MAD_TO_DEVIATION * float(np.median(np.abs(residual)))
        if deviation < 1e-12 or np.allclose(new, x, rtol=1e-6, atol=0.0):
            return new
        x, size = new, predicted
        weights = np.minimum(1.0, HUBER * deviation / np.maximum(np.abs(residual), 1e-300))
    return x


def robust_loss(matrix: Floats, target: Floats, x: Floats) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(matrix @ x / target - 1)))
