"""What a cost consists of: fitted to measurements, with no part of it negative."""

from collections.abc import Sequence

import numpy as np


def fit_parts(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
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
