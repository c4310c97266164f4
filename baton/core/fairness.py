"""Fairness between tenants: virtual token counters (VTC; Sheng et al., OSDI '24, algorithm 2).

Each tenant has a counter of what it was given, in weighted tokens, and who was given least goes
first. A tenant that comes back to the queue is lifted to the least of those in it: what it didn't
use while it was away, it can't make good on later. While two tenants have requests in the queue all
the time, what they are given differs by no more than ``slack_tokens`` and what one step and the
running answers give in between, however many requests either sends. A tenant of weight 2 is charged
half of what it is given, and so given twice as much.
"""

from collections.abc import Iterable

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""A token of an answer costs more than one of a prompt (the paper's weights)."""

SLACK_TOKENS = 32_768
"""Below it the order decides alone. About one long prompt: with less, each of them puts its tenant
behind for a while, though nobody sent too much."""

MAX_TENANTS = 4096
"""Counters kept, beside those of tenants in the queue; 100 bytes each. Who has been away longest
is forgotten, which is what lifting would mostly do anyway."""


class VirtualTokenCounters:
    """:meth:`join` and :meth:`leave` the queue, :meth:`charge` in between and after."""

    def __init__(self, slack_tokens: int = SLACK_TOKENS, max_tenants: int = MAX_TENANTS) -> None:
        assert slack_tokens > 0, slack_tokens
        self._slack_tokens = slack_tokens
        self._max_tenants = max_tenants
        self._counters: dict[bytes, float] = {}
        """Who joined last is last."""
        self._queued: dict[bytes, int] = {}
        """Requests in the queue, of those that have any."""
        self._last_left = b""

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to be fair to. While there is one tenant nothing is counted,
        since the second one is lifted to it."""
        return len(self._counters) > 1

    def join(self, tenant: bytes) -> None:
        """A request of the tenant enters the queue."""
        queued = self._queued.get(tenant, 0)
        if not queued:
            self._counters[tenant] = self._lifted(tenant, self._counters.pop(tenant, 0))
        self._queued[tenant] = queued + 1
        if len(self._counters) > self._max_tenants:
            self._forget_one()

    def leave(self, tenant: bytes) -> None:
        """A request of the tenant leaves the queue, to be served or not."""
        queued = self._queued.pop(tenant) - 1
        assert queued >= 0, tenant
        if queued:
            self._queued[tenant] = queued
        self._last_left = tenant

    def charge(
        self, tenant: bytes, input_tokens: int, output_tokens: int, weight: float = 1.0
    ) -> None:
        """The tenant was given these. Who never queued here isn't counted."""
        if tenant in self._counters:
            given = INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
            self._counters[tenant] += given / weight

    def arrears(self, tenants: Iterable[bytes]) -> dict[bytes, int]:
        """How far each was given more than the one that was given least, in whole slacks: those
        with 0 go first, and among equals the order decides."""
        counters = {tenant: self._counters.get(tenant, 0) for tenant in tenants}
        least = min(counters.values(), default=0)
        return {tenant: int((c - least) // self._slack_tokens) for tenant, c in counters.items()}

    def count(self, tenant: bytes) -> float:
        """What the tenant was given, in weighted tokens, lifts included."""
        return self._counters.get(tenant, 0)

    def _lifted(self, tenant: bytes, count: float) -> float:
        """To the least in the queue; into an empty queue, to whoever left it last."""
        if self._queued:
            return max(count, min(self._counters[each] for each in self._queued))
        return max(count, self._counters.get(self._last_left, 0))

    def _forget_one(self) -> None:
        away = next((each for each in self._counters if each not in self._queued), None)
        if away is not None:
            del self._counters[away]
