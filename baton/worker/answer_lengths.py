"""How long the answers were that this worker has ended."""

from collections import deque

import numpy as np

WINDOW_ANSWERS = 256
MIN_ANSWERS = 4
LOW_PERCENTILE = 10


class AnswerLengthStats:
    """Of the last ones; None before there were :data:`MIN_ANSWERS`."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=WINDOW_ANSWERS)

    def record(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)

    @property
    def mean(self) -> float | None:
        return float(np.mean(self._lengths)) if len(self._lengths) >= MIN_ANSWERS else None

    @property
    def short(self) -> float | None:
        """Nine in ten were longer."""
        if len(self._lengths) < MIN_ANSWERS:
            return None
        return float(np.percentile(self._lengths, LOW_PERCENTILE))
