"""Workers that fail request after request although their links hold: they get nothing for a while,
then one request as a probe, and a longer while if that fails as well."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.ids import WorkerId

FAILURES_TO_OPEN = 3
"""In a row. One or two may be the request's fault, or the other worker's of the pair."""

INITIAL_OPEN_SECONDS = 5.0
MAX_OPEN_SECONDS = 60.0
PROBE_TIMEOUT_SECONDS = 10.0
"""For a probe's first token to come or its failure, until another is let through."""

MAX_WORKERS = 4096
"""That are remembered; the one that failed first goes first."""


@dataclass(slots=True)
class CircuitBreaker:
    """``until`` is 0 while it is closed."""

    num_failures: int = 0
    until: float = 0.0
    pause: float = INITIAL_OPEN_SECONDS


class WorkerCircuitBreakers:
    """By worker. Closed: all goes through. Open: nothing, until its pause is over. Then one request
    does, and the first answer of any closes it. What fails while it is open began before."""

    def __init__(self) -> None:
        self._breakers: dict[WorkerId, CircuitBreaker] = {}

    def open_at(self, now: float) -> frozenset[WorkerId]:
        """Who gets nothing now, if anybody else is there."""
        if not self._breakers:
            return frozenset()
        return frozenset(worker for worker, each in self._breakers.items() if now < each.until)

    def note_placed(self, workers: Iterable[WorkerId], now: float) -> None:
        for worker in workers:
            breaker = self._breakers.get(worker)
            if breaker is not None and 0 < breaker.until <= now:
                breaker.until = now + PROBE_TIMEOUT_SECONDS
                breaker.num_failures = FAILURES_TO_OPEN - 1

    def note_failed(self, workers: Iterable[WorkerId], now: float) -> None:
        for worker in workers:
            breaker = self._breakers.setdefault(worker, CircuitBreaker())
            breaker.num_failures += 1
            if breaker.num_failures == FAILURES_TO_OPEN:
                breaker.until = now + breaker.pause
                breaker.pause = min(2 * breaker.pause, MAX_OPEN_SECONDS)
        while len(self._breakers) > MAX_WORKERS:
            del self._breakers[next(iter(self._breakers))]

    def note_answered(self, workers: Iterable[WorkerId]) -> None:
        if self._breakers:
            for worker in workers:
                self._breakers.pop(worker, None)
