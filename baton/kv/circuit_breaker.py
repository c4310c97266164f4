"""Keeps requests away from a node that is not well."""

MIN_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class CircuitBreaker:
    """Closed: everybody may go. After a failure it is open for a while, twice as long each time;
    then one may try, and his luck decides for the others."""

    def __init__(self) -> None:
        self._rest_seconds = 0.0
        self._open_until = float("-inf")
        self._trying = False

    def allows(self, now: float) -> bool:
        """Asks only; whoever goes says so by :meth:`enter`."""
        return now >= self._open_until and not self._trying

    def enter(self) -> None:
        self._trying = self._rest_seconds > 0

    def succeed(self) -> None:
        self._rest_seconds = 0.0
        self._trying = False

    def fail(self, now: float) -> None:
        longer = max(2 * self._rest_seconds, MIN_BACKOFF_SECONDS)
        self._rest_seconds = min(longer, MAX_BACKOFF_SECONDS)
        self._open_until = now + self._rest_seconds
        self._trying = False

    def leave(self) -> None:
        """It was neither: the caller was cancelled."""
        self._trying = False
