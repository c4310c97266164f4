"""Tracks which share of recent requests was admitted, by prompt length."""

from bisect import bisect_left
from collections import deque

import numpy as np

from conductor.policy.snapshot import AdmissionRates

WINDOW_REQUESTS = 1024
"""Number of recent requests from whose prompt lengths the quartiles are computed."""

REFRESH_REQUESTS = 64
"""Requests between two updates of the quartiles of prompt length."""

LARGE_PROMPT_PERCENTILE = 99.5
"""Percentile of prompt lengths that defines a large prompt."""

EWMA_WEIGHT = 0.003
"""Weight of the newest request in a quartile's admission rate, which thus covers about the last 300
requests. Over only 100, it is mostly chance which quartile has the lowest rate."""


class AdmissionTracker:
    """Keeps moving averages of the admission rate, per quartile of prompt length."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=WINDOW_REQUESTS)
        self._edges: tuple[int, ...] = ()
        self._large = 0
        self._shares = [1.0]
        self._num_recorded = 0

    def record(self, num_tokens: int, admitted: bool) -> None:
        quartile = bisect_left(self._edges, num_tokens)
        self._shares[quartile] += EWMA_WEIGHT * (admitted - self._shares[quartile])
        self._lengths.append(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % REFRESH_REQUESTS == 0:
            *edges, large = (
                np.percentile(self._lengths, [25, 50, 75, LARGE_PROMPT_PERCENTILE])
                .astype(int)
                .tolist()
            )
            self._edges, self._large = tuple(edges), large
            if len(self._shares) == 1:  # the share of all requests so far
                self._shares *= len(edges) + 1

    @property
    def view(self) -> AdmissionRates:
        return AdmissionRates(self._edges, tuple(self._shares), self._large)
