"""What a step costs by its number of tokens, measured on this machine."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that are told apart; a step counts as the next of them."""

WEIGHT = 0.15
"""Weight of the latest step in the moving average."""

MAX_RATIO = 2.0
"""A step counts as at most this many times as long as predicted: other load on the machine may
interrupt it."""

MAX_AGE_STEPS = 256
"""After so many steps a measurement is forgotten, so that a size that looked expensive is tried
again, at the cost of a few steps in hundreds."""

PRESUMED_TOKEN_SHARE = 0.25
"""Presumed cost of one more token, where nothing is measured, relative to a token's share of the
step. Low, so that drafting is tried."""


class VerifyCosts:
    """Predicts the seconds of a step that only decodes, by its number of tokens, drafts included.

    The cost is not linear: up to some ten tokens a step costs hardly more than one with a single
    token, because reading the weights takes longest. So it is kept by size, and interpolated."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds: dict[int, float] = {}
        self._last_steps: dict[int, int] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record a step that only decoded."""
        if num_tokens > SIZES[-1] or seconds <= 0:
            return
        self._num_steps += 1
        size = SIZES[bisect_left(SIZES, num_tokens)]
        before = self._seconds.get(size) if self._is_fresh(size) else None
        if before is None:
            self._seconds[size] = seconds
        else:
            seconds = min(seconds, MAX_RATIO * before)
            self._seconds[size] = before + WEIGHT * (seconds - before)
        self._last_steps[size] = self._num_steps

    def has_measured(self, num_tokens: int) -> bool:
        """Whether steps of about ``num_tokens`` tokens were measured lately."""
        return num_tokens <= SIZES[-1] and self._is_fresh(SIZES[bisect_left(SIZES, num_tokens)])

    def predict(self, first: int, last: int) -> NDArray[np.float64]:
        """Return the seconds of steps with ``first``, ``first + 1``, … ``last`` tokens.
        Something must have been measured (:meth:`has_measured`)."""
        sizes = [size for size in SIZES if self._is_fresh(size)]
        seconds = [self._seconds[size] for size in sizes]
        counts = np.arange(first, last + 1)
        # A larger step never takes less time: where a measurement says so, it is noise.
        known: NDArray[np.float64] = np.interp(counts, sizes, np.maximum.accumulate(seconds))
        beyond = np.maximum(counts - sizes[-1], 0)
        added: NDArray[np.float64] = beyond * (PRESUMED_TOKEN_SHARE * known[-1] / sizes[-1])
        return known + added

    def _is_fresh(self, size: int) -> bool:
        last = self._last_steps.get(size)
        return last is not None and self._num_steps - last < MAX_AGE_STEPS
