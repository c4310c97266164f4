"""What load is to come: level and trend of what came (double exponential smoothing, Holt 1957)."""

import math
from dataclasses import dataclass

LEVEL_SECONDS = 60.0
"""An observation so old weighs 1/e of a new one."""

TREND_SECONDS = 600.0
"""A trend is seen more slowly, or noise is taken for one."""


@dataclass(frozen=True, slots=True)
class HoltSmoother:
    """``level`` at ``at_seconds``, and what it gains per second. Observations may come at any
    distance of time: smoothing is by the time that has passed."""

    at_seconds: float
    level: float
    trend: float = 0.0

    def updated(self, now_seconds: float, value: float) -> "HoltSmoother":
        """With one more observation. One of the same moment, or from before, changes nothing."""
        passed = now_seconds - self.at_seconds
        if passed <= 0:
            return self
        expected = self.level + self.trend * passed
        level = expected + _weight(passed, LEVEL_SECONDS) * (value - expected)
        slope = (level - self.level) / passed
        trend = self.trend + _weight(passed, TREND_SECONDS) * (slope - self.trend)
        return HoltSmoother(now_seconds, level, trend)

    def ahead(self, seconds: float) -> float:
        """Expected so much later; never below 0."""
        return max(self.level + self.trend * seconds, 0.0)


def _weight(passed_seconds: float, memory_seconds: float) -> float:
    return 1 - math.exp(-passed_seconds / memory_seconds)


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """``prompt_tokens`` and ``answer_tokens`` are a request's in the mean; ``cached_share`` of the
    prompts' tokens need no computing."""

    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadTrend:
    """Of each part of the load by itself."""

    requests_per_second: HoltSmoother
    prompt_tokens: HoltSmoother
    answer_tokens: HoltSmoother
    cached_share: HoltSmoother

    @classmethod
    def begun(cls, now_seconds: float, load: LoadForecast) -> "LoadTrend":
        """The first observation."""
        return cls(
            HoltSmoother(now_seconds, load.requests_per_second),
            HoltSmoother(now_seconds, load.prompt_tokens),
            HoltSmoother(now_seconds, load.answer_tokens),
            HoltSmoother(now_seconds, load.cached_share),
        )

    def updated(self, now_seconds: float, load: LoadForecast) -> "LoadTrend":
        return LoadTrend(
            self.requests_per_second.updated(now_seconds, load.requests_per_second),
            self.prompt_tokens.updated(now_seconds, load.prompt_tokens),
            self.answer_tokens.updated(now_seconds, load.answer_tokens),
            self.cached_share.updated(now_seconds, load.cached_share),
        )

    def ahead(self, seconds: float) -> LoadForecast:
        """The most work between now and then: a pool that is about to be needed is not shrunk, and
        one that is needed now is not shrunk because of what may be later."""
        cached = min(self.cached_share.ahead(0.0), self.cached_share.ahead(seconds), 1.0)
        return LoadForecast(
            max(self.requests_per_second.ahead(0.0), self.requests_per_second.ahead(seconds)),
            max(self.prompt_tokens.ahead(0.0), self.prompt_tokens.ahead(seconds)),
            max(self.answer_tokens.ahead(0.0), self.answer_tokens.ahead(seconds)),
            cached,
        )
