"""Fits the coefficients of a cost to measurements by least squares, with no coefficient below 0."""

import math
from collections.abc import Sequence

import numpy as np


def fit_nonnegative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the ``coefficients`` that solve ``columns · coefficients = seconds`` by least squares
    of the relative errors, so that a short step counts as much as a long one. While a coefficient
    would be negative, the lowest is set to 0, and the others are fitted again."""
    times = np.array(seconds)
    scaled = np.array(columns) / times[:, None]
    coefficients = [0.0] * scaled.shape[1]
    used = list(range(scaled.shape[1]))
    while used:
        solution = np.linalg.lstsq(scaled[:, used], np.ones(len(times)), rcond=None)[0]
        if (solution >= 0).all():
            for index, coefficient in zip(used, solution.tolist(), strict=True):
                coefficients[index] = coefficient
            return coefficients
        used.pop(int(solution.argmin()))
    return coefficients


def relative_error(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    coefficients: Sequence[float],
    at: Sequence[float],
) -> float | None:
    """Return the standard error of the fit's prediction for ``at``, relative to that prediction.
    The error grows with the distance of ``at`` from the measurements. Return None if no coefficient
    is above 0, or if there are no more measurements than coefficients above 0."""
    times, fitted = np.array(seconds), np.array(coefficients)
    used = fitted > 0
    scaled = (np.array(columns) / times[:, None])[:, used]
    num_free = len(times) - int(used.sum())
    if num_free < 1 or not used.any():
        return None
    residuals = 1 - scaled @ fitted[used]
    row = np.array(at)[used]
    spread = row @ np.linalg.pinv(scaled.T @ scaled) @ row
    variance = float(residuals @ residuals) / num_free * max(float(spread), 0.0)
    return math.sqrt(variance) / float(row @ fitted[used])
