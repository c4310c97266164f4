"""Statistics of answer lengths, which all simulated conductors use."""

from baton.worker.answer_lengths import AnswerLengthStats

WINDOW_ANSWERS = 1024
"""Larger than the window of one worker, since it covers the answers of all workers."""

REFRESH_ANSWERS = 16
"""The statistics are recomputed after this many answers, since each computation reads the whole
window."""


class ClusterAnswerLengths:
    """Statistics of the latest answers of all workers: ``mean`` and ``short`` (the 10th
    percentile), in tokens. Both have default values until enough answers have ended."""

    def __init__(self) -> None:
        self.mean = 256.0
        self.short = 16.0
        self._stats = AnswerLengthStats(WINDOW_ANSWERS)
        self._num_recorded = 0

    def record(self, num_tokens: int) -> None:
        self._stats.record(num_tokens)
        self._num_recorded += 1
        if self._num_recorded % REFRESH_ANSWERS:
            return
        mean, short = self._stats.mean, self._stats.short
        assert mean is not None and short is not None, "too few answers were recorded"
        self.mean, self.short = mean, short
