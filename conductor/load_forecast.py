"""Forecasts the load from its level and trend (double exponential smoothing, Holt 1957)."""

import math
from dataclasses import dataclass

LEVEL_SECONDS = 60.0
"""An observation of this age weighs 1/e of a new one."""

TREND_SECONDS = 600.0
"""The trend adapts more slowly than the level, so that noise is not taken for a trend."""


@dataclass(frozen=True, slots=True)
class HoltSmoother:
    """The smoothed state of one value: its ``level`` at ``at_seconds``, and its ``trend`` per
    second. Observations may come at irregular times: smoothing depends on the time that has
    passed."""

    at_seconds: float
    level: float
    trend: float = 0.0

    def updated(self, now_seconds: float, value: float) -> "HoltSmoother":
        """Return a smoother with one more observation. An observation that is not newer than the
        last one changes nothing."""
        passed = now_seconds - self.at_seconds
        if passed <= 0:
            return self
        expected = self.level + self.trend * passed
        level = expected + _weight(passed, LEVEL_SECONDS) * (value - expected)
        slope = (level - self.level) / passed
        trend = self.trend + _weight(passed, TREND_SECONDS) * (slope - self.trend)
        return HoltSmoother(now_seconds, level, trend)

    def forecast(self, seconds: float) -> float:
        """Return the value expected ``seconds`` after the last observation; never below 0."""
        return max(self.level + self.trend * seconds, 0.0)


def _weight(passed_seconds: float, memory_seconds: float) -> float:
    return 1 - math.exp(-passed_seconds / memory_seconds)


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """An observed or expected load. ``prompt_tokens`` and ``answer_tokens`` are means per request.
    ``cached_share`` is the share of prompt tokens that need not be computed."""

    requests_per_second: float
    prompt_tokens: float
    answer_tokens: float
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadTrend:
    """Level and trend of each component of the load, smoothed independently."""

    requests_per_second: HoltSmoother
    prompt_tokens: HoltSmoother
    answer_tokens: HoltSmoother
    cached_share: HoltSmoother

    @classmethod
    def start(cls, now_seconds: float, load: LoadForecast) -> "LoadTrend":
        """Start a trend with its first observation."""
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

    def forecast(self, seconds: float) -> LoadForecast:
        """Return, for each component, the higher of its values now and ``seconds`` later (for the
        cached share, the lower one), so that a pool is not shrunk if its workers are needed now or
        will be needed soon."""
        cached = min(self.cached_share.forecast(0.0), self.cached_share.forecast(seconds), 1.0)
        return LoadForecast(
            max(self.requests_per_second.forecast(0.0), self.requests_per_second.forecast(seconds)),
            max(self.prompt_tokens.forecast(0.0), self.prompt_tokens.forecast(seconds)),
            max(self.answer_tokens.forecast(0.0), self.answer_tokens.forecast(seconds)),
            cached,
        )
