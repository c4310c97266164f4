"""How often recent requests were let in, by the length of their prompts."""

from bisect import bisect_left
from collections import deque

import numpy as np

from conductor.policy.snapshot import AdmissionRates

WINDOW_REQUESTS = 1024
REFRESH_REQUESTS = 64
"""Between two looks at what is long and what is short."""

LARGE_PROMPT_PERCENTILE = 99.5
"""Of prompts are shorter than a large one."""

EWMA_WEIGHT = 0.003
"""Of the newest request in a quarter's share: about the last three hundred count. With a hundred,
which quarter fares worst is mostly chance."""


class AdmissionTracker:
    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=WINDOW_REQUESTS)
        self._edges: tuple[int, ...] = ()
        self._large = 0
        self._shares = [1.0]
        self._num_recorded = 0

    def record(self, num_tokens: int, admitted: bool) -> None:
        quarter = bisect_left(self._edges, num_tokens)
        self._shares[quarter] += EWMA_WEIGHT * (admitted - self._shares[quarter])
        self._lengths.append(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % REFRESH_REQUESTS == 0:
            *edges, large = (
                np.percentile(self._lengths, [25, 50, 75, LARGE_PROMPT_PERCENTILE])
                .astype(int)
                .tolist()
            )
            self._edges, self._large = tuple(edges), large
            self._shares += [1.0] * (len(edges) + 1 - len(self._shares))

    @property
    def view(self) -> AdmissionRates:
        return AdmissionRates(self._edges, tuple(self._shares), self._large)
