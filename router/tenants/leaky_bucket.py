"""A token bucket that counts what was taken: so a limit may change while it is in use."""

import math


class LeakyBucket:
    """What was spent drains away at the limit's rate. Synchronous, O(1); times are the caller's,
    monotonic seconds. ``per_minute`` is also the most that may be spent at once."""

    __slots__ = ("_at", "_spent")

    def __init__(self) -> None:
        self._spent = 0.0
        self._at = -math.inf

    def remaining(self, per_minute: float, now: float) -> float:
        """Below zero while more was spent than there was."""
        return per_minute - self._drained(per_minute, now)

    def spent(self, per_minute: float, now: float) -> float:
        """What has not drained yet."""
        return self._drained(per_minute, now)

    def wait_seconds(self, amount: float, per_minute: float, now: float) -> float:
        """Until ``amount`` may be spent; 0 if it may be now. More than there ever is at once may be
        spent when there is all, and is paid off afterwards."""
        over = self._drained(per_minute, now) + min(amount, per_minute) - per_minute
        return max(over, 0.0) * 60 / per_minute

    def full_seconds(self, per_minute: float, now: float) -> float:
        """Until nothing is spent any more."""
        return self._drained(per_minute, now) * 60 / per_minute

    def spend(self, amount: float) -> None:
        """Below zero: gives back. Asked for the wait first, or spent already."""
        self._spent = max(self._spent + amount, 0.0)

    def _drained(self, per_minute: float, now: float) -> float:
        if now > self._at:
            self._spent = max(self._spent - (now - self._at) * per_minute / 60, 0.0)
            self._at = now
        return self._spent
