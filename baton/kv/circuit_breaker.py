"""A circuit breaker that keeps calls away from a failing store node.

The router has a different one for workers (:mod:`router.generation.circuit_breaker`). A call to a
store takes milliseconds, and its caller always reports how it ended, so this breaker opens after a
single failure and waits for the result of its probe. A model's answer, in contrast, takes minutes,
its failure may be due to any of several workers, and its end may never be reported, so the router's
breaker counts failures and allows another probe after a timeout."""

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class StoreCircuitBreaker:
    """The circuit breaker of one store node. While it is closed, it allows all requests. A failure
    opens it for a while, twice as long after each further failure; while it is open, it allows no
    request. Then it allows one request as a probe, whose result closes it or opens it again."""

    def __init__(self) -> None:
        self._backoff_seconds = 0.0
        self._open_until = float("-inf")
        self._is_probing = False

    def allows_request(self, now: float) -> bool:
        """Whether a request may be sent now. Call :meth:`begin_request` before sending it."""
        return now >= self._open_until and not self._is_probing

    def begin_request(self) -> None:
        """Record that a request is sent. The first request that is sent after a failure is the
        probe: no other request is allowed until the probe's success, failure or cancellation is
        recorded."""
        self._is_probing = self._backoff_seconds > 0

    def record_success(self) -> None:
        """Record that a request succeeded, and close the breaker."""
        self._backoff_seconds = 0.0
        self._is_probing = False

    def record_failure(self, now: float) -> None:
        """Record that a request failed, and open the breaker for twice as long as the last time, up
        to a limit."""
        longer = max(2 * self._backoff_seconds, MIN_BACKOFF_SECONDS)
        self._backoff_seconds = min(longer, MAX_BACKOFF_SECONDS)
        self._open_until = now + self._backoff_seconds
        self._is_probing = False

    def record_cancellation(self) -> None:
        """Record that a request neither succeeded nor failed, because its caller was cancelled. If
        it was the probe, the next request becomes the probe."""
        self._is_probing = False
