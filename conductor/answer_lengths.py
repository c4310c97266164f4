"""Statistics of the lengths of recent answers."""

from collections import deque

import numpy as np

WINDOW_ANSWERS = 1024
REFRESH_ANSWERS = 16
LOW_PERCENTILE = 10


class AnswerLengthStats:
    """``mean`` and ``short`` (10th percentile) in tokens; defaults until there are enough
    answers."""

    def __init__(self) -> None:
        self.mean = 256.0
        self.short = 16.0
        self._lengths: deque[int] = deque(maxlen=WINDOW_ANSWERS)
        self._num_recorded = 0

    def record(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % REFRESH_ANSWERS == 0:
            self.mean = float(np.mean(self._lengths))
            self.short = float(np.percentile(self._lengths, LOW_PERCENTILE))
