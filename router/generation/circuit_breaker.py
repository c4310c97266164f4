"""Circuit breakers for workers that fail request after request although their connections work.

Such a worker gets no requests for a while, then one request as a probe, and if that fails as well,
none for a longer while. Calls to store nodes have a breaker of their own
(:mod:`baton.kv.circuit_breaker`, which says why there are two)."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.registry.limits import MAX_MEMBERS
from router.limits import MAX_OPEN_SECONDS

FAILURES_TO_OPEN = 3
"""Consecutive failures that open the breaker. One or two may be caused by the request, or by the
other worker of the pair."""

INITIAL_OPEN_SECONDS = 5.0
PROBE_TIMEOUT_SECONDS = 10.0
"""How long to wait for a probe's first token or failure before another probe is let through."""


@dataclass(slots=True)
class _BreakerState:
    """One worker's breaker. While ``open_until`` is 0, the breaker is closed; otherwise it is open
    until that monotonic time, after which one request passes as a probe. When it opens the
    next time, it opens for ``next_open_seconds``, which then doubles up to ``MAX_OPEN_SECONDS``."""

    num_failures: int = 0
    open_until: float = 0.0
    next_open_seconds: float = INITIAL_OPEN_SECONDS


class WorkerCircuitBreakers:
    """Circuit breakers by worker.

    While its breaker is closed, a worker gets requests as usual. ``FAILURES_TO_OPEN`` consecutive
    failures open the breaker, at first for ``INITIAL_OPEN_SECONDS``. While the breaker is open, the
    worker gets no requests, unless there are no other workers. When the time is over, one request
    passes as a probe, and the breaker stays open for other requests until the probe succeeds or
    fails. If neither happens within ``PROBE_TIMEOUT_SECONDS``, another request passes as a probe.

    If the probe fails, the breaker opens again, for twice as long as before, but at most for
    ``MAX_OPEN_SECONDS``. The first success of any request closes the breaker. A failure between the
    opening and the probe does not keep the breaker open longer: as a rule, it belongs to a request
    that began before the breaker opened."""

    def __init__(self) -> None:
        self._breakers: dict[WorkerId, _BreakerState] = {}

    def open_workers(self, now: float) -> frozenset[WorkerId]:
        """Return the workers that should get no requests now, unless there are no other workers."""
        if not self._breakers:
            return frozenset()
        return frozenset(
            worker for worker, breaker in self._breakers.items() if now < breaker.open_until
        )

    def record_placement(self, workers: Iterable[WorkerId], now: float) -> None:
        for worker in workers:
            breaker = self._breakers.get(worker)
            if breaker is not None and 0 < breaker.open_until <= now:
                breaker.open_until = now + PROBE_TIMEOUT_SECONDS
                breaker.num_failures = FAILURES_TO_OPEN - 1

    def record_failure(self, workers: Iterable[WorkerId], now: float) -> None:
        for worker in workers:
            breaker = self._breakers.setdefault(worker, _BreakerState())
            breaker.num_failures += 1
            if breaker.num_failures == FAILURES_TO_OPEN:
                breaker.open_until = now + breaker.next_open_seconds
                breaker.next_open_seconds = min(2 * breaker.next_open_seconds, MAX_OPEN_SECONDS)
        while len(self._breakers) > MAX_MEMBERS:
            del self._breakers[next(iter(self._breakers))]

    def record_success(self, workers: Iterable[WorkerId]) -> None:
        if self._breakers:
            for worker in workers:
                self._breakers.pop(worker, None)
