"""How long recent answers were."""

from collections import deque

import numpy as np

WINDOW_ANSWERS = 1024
RENEW_ANSWERS = 16
SHORT_PERCENT = 10


class AnswerLengthStats:
    """``mean`` and ``short`` (nine in ten are longer), in tokens; guesses before there was one."""

    def __init__(self) -> None:
        self.mean = 256.0
        self.short = 16.0
        self._lengths: deque[int] = deque(maxlen=WINDOW_ANSWERS)
        self._num_recorded = 0

    def record(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % RENEW_ANSWERS == 0:
            self.mean = float(np.mean(self._lengths))
            self.short = float(np.percentile(self._lengths, SHORT_PERCENT))
