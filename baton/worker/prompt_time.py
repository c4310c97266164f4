"""Measures the share of time that a worker spends on prompts."""

import math

MEMORY_SECONDS = 5.0
"""The time constant of the average: a step of this age weighs 1/e of a new one."""


class PromptTime:
    """The exponential moving average of the share of time that steps with prompts take. Times come
    from a monotonic clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at_seconds = 0.0

    def record(self, now_seconds: float, step_seconds: float) -> None:
        """Record a step that computed prompts and has ended at ``now_seconds``."""
        self._seconds = self._decayed(now_seconds) + step_seconds
        self._at_seconds = now_seconds

    def share(self, now_seconds: float) -> float:
        """Return the share, from 0 to 1."""
        return min(self._decayed(now_seconds) / MEMORY_SECONDS, 1.0)

    def _decayed(self, now_seconds: float) -> float:
        return self._seconds * math.exp((self._at_seconds - now_seconds) / MEMORY_SECONDS)
