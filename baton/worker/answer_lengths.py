"""Statistics of the lengths of finished answers."""

from collections import deque

import numpy as np

WINDOW_ANSWERS = 256
MIN_ANSWERS = 4
LOW_PERCENTILE = 10


class AnswerLengthStats:
    """Statistics, in tokens, of the last ``window_answers`` answers. They are None until
    :data:`MIN_ANSWERS` answers have finished."""

    def __init__(self, window_answers: int = WINDOW_ANSWERS) -> None:
        self._lengths: deque[int] = deque(maxlen=window_answers)

    def record(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)

    @property
    def mean(self) -> float | None:
        return float(np.mean(self._lengths)) if len(self._lengths) >= MIN_ANSWERS else None

    @property
    def short(self) -> float | None:
        """The 10th percentile."""
        if len(self._lengths) < MIN_ANSWERS:
            return None
        return float(np.percentile(self._lengths, LOW_PERCENTILE))
