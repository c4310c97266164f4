"""A leaky bucket: it counts what was spent, so its limit may change while it is in use."""

import math


class LeakyBucket:
    """Counts the amount that was spent, which drains at the limit's rate. Every method takes O(1)
    time. ``now`` is in monotonic seconds. ``per_minute`` is the limit, and also the capacity of the
    bucket."""

    __slots__ = ("_at", "_spent")

    def __init__(self) -> None:
        self._spent = 0.0
        self._at = -math.inf

    def remaining(self, per_minute: float, now: float) -> float:
        """Return the amount that may still be spent; below zero if more was spent than allowed."""
        return per_minute - self._drain(per_minute, now)

    def spent(self, per_minute: float, now: float) -> float:
        """Return the amount that was spent and has not drained yet."""
        return self._drain(per_minute, now)

    def wait_seconds(self, amount: float, per_minute: float, now: float) -> float:
        """Return the seconds until ``amount`` may be spent; 0 if it may be spent now. An amount
        above the limit may be spent when the bucket is empty, and drains afterwards."""
        excess = self._drain(per_minute, now) + min(amount, per_minute) - per_minute
        return max(excess, 0.0) * 60 / per_minute

    def spend(self, amount: float) -> None:
        """Spend an amount without a check (call :meth:`wait_seconds` first). A negative amount
        gives unused quota back."""
        self._spent = max(self._spent + amount, 0.0)

    def _drain(self, per_minute: float, now: float) -> float:
        if now > self._at:
            self._spent = max(self._spent - (now - self._at) * per_minute / 60, 0.0)
            self._at = now
        return self._spent
