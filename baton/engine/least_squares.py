"""What a cost consists of: fitted to measurements, with no part of it negative."""

import math
from collections.abc import Sequence

import numpy as np


def fit_nonnegative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of ``columns · parts = seconds``, each relative to its own time, so that a
    short step counts as much as a long one. What would be negative is left out, and the others
    are fitted anew."""
    times = np.array(seconds)
    scaled = np.array(columns) / times[:, None]
    parts = [0.0] * scaled.shape[1]
    used = list(range(scaled.shape[1]))
    while used:
        solution = np.linalg.lstsq(scaled[:, used], np.ones(len(times)), rcond=None)[0]
        if (solution >= 0).all():
            for index, part in zip(used, solution.tolist(), strict=True):
                parts[index] = part
            return parts
        used.pop(int(solution.argmin()))
    return parts


def relative_error(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    parts: Sequence[float],
    at: Sequence[float],
) -> float | None:
    """Standard error of what the fit says of ``at``, relative to that; None where there are not
    more measurements than parts. The farther ``at`` is from what was measured, the larger."""
    times, fitted = np.array(seconds), np.array(parts)
    used = fitted > 0
    scaled = (np.array(columns) / times[:, None])[:, used]
    num_free = len(times) - int(used.sum())
    if num_free < 1 or not used.any():
        return None
    misses = 1 - scaled @ fitted[used]
    row = np.array(at)[used]
    spread = row @ np.linalg.pinv(scaled.T @ scaled) @ row
    variance = float(misses @ misses) / num_free * max(float(spread), 0.0)
    return math.sqrt(variance) / float(row @ fitted[used])
