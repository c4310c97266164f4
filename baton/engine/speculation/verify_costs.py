"""What a step costs by its number of tokens, measured on this machine."""

from bisect import bisect_left
from collections import deque
from statistics import median

import numpy as np

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that are told apart; a step counts as the next of them."""

NUM_SAMPLES = 9
"""The cost of a size is the median of so many steps, because other load on the machine interrupts
single steps."""

MIN_MEDIAN_SAMPLES = 4
"""Of fewer steps, the shortest counts."""

MAX_AGE_STEPS = 256
"""After so many steps a measurement is forgotten, so that a size that looked expensive is tried
again, at the cost of a few steps in hundreds."""

MAX_BASE_AGE_STEPS = 64
"""The same for steps without drafts, with which all others are compared."""

PRESUMED_TOKEN_SHARE = 0.25
"""Presumed cost of one more token, where nothing is measured, relative to a token's share of the
step. Low, so that drafting is tried."""

PREDICTION_STEPS = 8
"""Number of steps for which a prediction is kept, since computing it takes 30 µs."""

MIN_TOKEN_COST = 0.01
"""Minimum cost of a draft, relative to the step without drafts. Where measurements say that drafts
cost nothing, they are not exact."""


class _Size:
    """The latest steps of one size."""

    __slots__ = ("_seconds", "last_step", "samples")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        self.last_step = 0
        self._seconds: float | None = None

    def record(self, seconds: float, step: int) -> None:
        self.samples.append(seconds)
        self.last_step = step
        self._seconds = None

    @property
    def seconds(self) -> float:
        """The median of the steps. It is computed when it is asked for, since that takes 15 µs."""
        if self._seconds is None:
            few = len(self.samples) < MIN_MEDIAN_SAMPLES
            self._seconds = min(self.samples) if few else median(self.samples)
        return self._seconds


class VerifyCosts:
    """Predicts the seconds of a step that only decodes, by its number of tokens, drafts included.

    The cost is not linear: up to some ten tokens a step costs hardly more than one with a single
    token, because reading the weights takes longest. So it is kept by size, and interpolated."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._sizes: dict[int, _Size] = {}
        self._predictions: dict[int, list[float]] = {}
        self._predicted_until = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record a step that only decoded."""
        if num_tokens > SIZES[-1] or seconds <= 0:
            return
        self._num_steps += 1
        name = SIZES[bisect_left(SIZES, num_tokens)]
        size = self._sizes.get(name)
        if size is None or not self._is_fresh(size):
            size = self._sizes[name] = _Size()
        size.record(seconds, self._num_steps)

    def has_base(self, num_answers: int) -> bool:
        """Whether steps of ``num_answers`` answers without drafts were measured lately."""
        if num_answers > SIZES[-1]:
            return False
        size = self._sizes.get(SIZES[bisect_left(SIZES, num_answers)])
        return size is not None and self._num_steps - size.last_step < MAX_BASE_AGE_STEPS

    def predict(self, num_answers: int, max_drafts: int) -> list[float]:
        """Return the seconds of steps of ``num_answers`` answers with 0, 1, … drafts, for at least
        ``max_drafts``. :meth:`has_base` must be true. The result is computed again every
        ``PREDICTION_STEPS`` steps."""
        if self._num_steps >= self._predicted_until:
            self._predictions.clear()
            self._predicted_until = self._num_steps + PREDICTION_STEPS
        known = self._predictions.get(num_answers)
        if known is None or len(known) <= max_drafts:
            known = self._predictions[num_answers] = self._predict(num_answers, max_drafts)
        return known

    def _predict(self, num_answers: int, max_drafts: int) -> list[float]:
        sizes = [name for name in SIZES if self._is_fresh(self._sizes.get(name))]
        seconds = [self._sizes[name].seconds for name in sizes]
        drafts = np.arange(max_drafts + 1)
        counts = num_answers + drafts
        known = np.interp(counts, sizes, seconds)
        token_seconds = PRESUMED_TOKEN_SHARE * seconds[-1] / sizes[-1]
        known += token_seconds * np.maximum(counts - sizes[-1], 0)
        # A larger step never takes less time: where a measurement says so, it is not exact.
        known = np.maximum.accumulate(known)
        lowest = known[0] * (1 + MIN_TOKEN_COST * drafts)
        predicted: list[float] = np.maximum(known, lowest).tolist()
        return predicted

    def _is_fresh(self, size: _Size | None) -> bool:
        return size is not None and self._num_steps - size.last_step < MAX_AGE_STEPS
