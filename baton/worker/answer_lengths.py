"""Statistics of the lengths of finished answers."""

from collections import deque

import numpy as np

from baton.core.answer_length_predictor import MIN_ANSWERS

WINDOW_ANSWERS = 256
LOW_PERCENTILE = 10
UNKNOWN_ANSWER_TOKENS = 256.0
"""The assumed length of an answer before any has finished on this worker."""


class AnswerLengthStats:
    """Statistics, in tokens, of the last ``window_answers`` answers. They are None until
    :data:`MIN_ANSWERS` answers have finished."""

    def __init__(self, window_answers: int = WINDOW_ANSWERS) -> None:
        self._lengths: deque[int] = deque(maxlen=window_answers)
        # Computed at the first read after an answer has ended: reads are far more frequent.
        self._mean: float | None = None
        self._short: float | None = None
        self._is_current = True

    def record(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)
        self._is_current = False

    @property
    def mean(self) -> float | None:
        self._compute()
        return self._mean

    @property
    def short(self) -> float | None:
        """The 10th percentile of the lengths."""
        self._compute()
        return self._short

    def _compute(self) -> None:
        if not self._is_current and len(self._lengths) >= MIN_ANSWERS:
            self._mean = float(np.mean(self._lengths))
            self._short = float(np.percentile(self._lengths, LOW_PERCENTILE))
        self._is_current = True
