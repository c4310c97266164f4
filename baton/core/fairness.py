"""Fairness between tenants: virtual token counters (VTC; Sheng et al., OSDI '24, algorithm 2), and
the order of virtual finish times (Demers, Keshav and Shenker, "Analysis and simulation of a fair
queueing algorithm", SIGCOMM '89).

Each tenant has a counter of the service that it has received, in weighted tokens. When a tenant
returns to the queue, its counter is lifted to the lowest one in the queue, so that a tenant can't
save up service while it is away. A prompt's virtual finish time is the value that its tenant's
counter will have once the prompt and those before it of the same tenant are computed; the prompt
with the earliest one goes first. So a tenant that uses less than its share hardly waits for others,
whatever they have queued, but a long prompt does not delay the short ones of all other tenants.

While two tenants always have requests in the queue, their service differs by no more than the
longest prompt plus what one step and the running answers consume, however many requests either
sends. A tenant of weight 2 is charged half as much per token, and so receives twice the service.
"""

from collections.abc import Iterable

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""A token of an answer costs more than one of a prompt (the paper's weights)."""

MAX_TENANTS = 4096
"""Maximum number of counters, 100 bytes each. Beyond it, the tenant that has been out of the queue
longest loses its counter; on its return, lifting mostly gives it the same value."""


class VirtualTokenCounters:
    """Counters of all tenants of a queue. Call :meth:`join` and :meth:`leave` for each request in
    the queue, and :meth:`charge` for its service."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._counters: dict[bytes, float] = {}
        """Each tenant's counter, in the order in which the tenants last joined the queue."""
        self._queued: dict[bytes, int] = {}
        """Number of requests in the queue, for tenants that have any."""
        self._last_left = b""

    @property
    def has_several_tenants(self) -> bool:
        """Whether several tenants have a counter. While there is only one, its service need not be
        charged: the counter of a second tenant would be lifted to the same value anyway."""
        return len(self._counters) > 1

    def join(self, tenant: bytes) -> None:
        """Record that a request of the tenant enters the queue."""
        queued = self._queued.get(tenant, 0)
        if not queued:
            self._counters[tenant] = self._lifted(tenant, self._counters.pop(tenant, 0))
        self._queued[tenant] = queued + 1
        if len(self._counters) > self._max_tenants:
            self._forget_one()

    def leave(self, tenant: bytes) -> None:
        """Record that a request of the tenant leaves the queue, whether it is served or not."""
        queued = self._queued.pop(tenant) - 1
        assert queued >= 0, tenant
        if queued:
            self._queued[tenant] = queued
        self._last_left = tenant

    def charge(
        self, tenant: bytes, input_tokens: int, output_tokens: int, weight: float = 1.0
    ) -> None:
        """Charge the tenant for the tokens of a step. A tenant that was never in this queue is
        ignored."""
        if tenant in self._counters:
            charged = INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
            self._counters[tenant] += charged / weight

    def virtual_finishes(self, prompts: Iterable[tuple[bytes, int, float]]) -> list[float]:
        """Return the virtual finish time of each prompt, in weighted tokens. A prompt is a tenant,
        the number of tokens still to be computed, and a weight; the prompts of a tenant must be in
        the order in which they will be computed."""
        finishes, ends = [], dict[bytes, float]()
        for tenant, num_tokens, weight in prompts:
            start = ends.get(tenant, self.counter(tenant))
            ends[tenant] = start + INPUT_WEIGHT * num_tokens / weight
            finishes.append(ends[tenant])
        return finishes

    def least_served(self, tenants: Iterable[bytes]) -> set[bytes]:
        """Return those of ``tenants`` that have the lowest counter."""
        counters = {tenant: self.counter(tenant) for tenant in tenants}
        least = min(counters.values(), default=0)
        return {tenant for tenant, counter in counters.items() if counter == least}

    def counter(self, tenant: bytes) -> float:
        """Return the tenant's counter, in weighted tokens. It may exceed the service received,
        since it is lifted when the tenant returns to the queue."""
        return self._counters.get(tenant, 0)

    def _lifted(self, tenant: bytes, count: float) -> float:
        """Return the counter of a tenant that joins the queue: its old counter ``count`` or, if
        that is higher, the lowest counter of the tenants in the queue. If the queue is empty, the
        counter of the tenant that left it last takes the place of the lowest."""
        if self._queued:
            return max(count, min(self._counters[each] for each in self._queued))
        return max(count, self._counters.get(self._last_left, 0))

    def _forget_one(self) -> None:
        away = next((each for each in self._counters if each not in self._queued), None)
        if away is not None:
            del self._counters[away]
