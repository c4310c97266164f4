"""What one tenant has used of its limits, at this router."""

import math

from router.tenants.limited import (
    duration,
    too_large,
    too_many_at_once,
    too_many_requests,
    too_many_tokens,
)
from router.tenants.meter import Meter
from router.tenants.tenant import Tenant


class Account:
    """Every :meth:`begin` that does not raise is followed by one :meth:`end`, and so is every
    :meth:`reserve` by one :meth:`settle`. ``routers`` share the tenant's limits: each gives an
    equal part of them."""

    __slots__ = ("_refused_bytes", "_refused_tokens", "_requests", "_tokens", "reserved", "running")

    def __init__(self) -> None:
        self.running = 0
        self.reserved = 0
        """Tokens that requests under way were promised."""
        self._requests = Meter()
        self._tokens = Meter()
        self._refused_tokens = 0
        self._refused_bytes = 0
        """Of the last request that was refused for its tokens."""

    def begin(self, tenant: Tenant, routers: int, size_bytes: int, now: float) -> None:
        """One more request, before its body is read. Raises RateLimited, and costs nothing then."""
        limits = tenant.limits
        if limits.concurrent_requests is not None:
            limit = math.ceil(limits.concurrent_requests / routers)
            if self.running >= limit:
                raise too_many_at_once(tenant, limit)
        if limits.tokens_per_minute is not None:
            self._check_tokens_left(tenant, limits.tokens_per_minute / routers, size_bytes, now)
        if limits.requests_per_minute is not None:
            per_minute = max(limits.requests_per_minute / routers, 1.0)
            wait = self._requests.wait_seconds(1, per_minute, now)
            if wait > 0:
                used = per_minute - self._requests.remaining(per_minute, now)
                raise too_many_requests(tenant, per_minute, used, wait)
            self._requests.spend(1)
        self.running += 1

    def end(self) -> None:
        self.running -= 1
        assert self.running >= 0, "begin() comes first"

    def reserve(
        self, tenant: Tenant, routers: int, tokens: int, size_bytes: int, now: float
    ) -> None:
        """Of a prompt and the answer that it may get. Raises RateLimited, and costs nothing then.
        Requests at least as large are not looked at before this one could have come in."""
        limit = tenant.limits.tokens_per_minute
        if limit is not None:
            if tokens > limit:
                raise too_large(tenant, limit, tokens)
            per_minute = limit / routers
            wait = self._tokens.wait_seconds(tokens, per_minute, now)
            if wait > 0:
                self._refused_tokens, self._refused_bytes = tokens, size_bytes
                used = per_minute - self._tokens.remaining(per_minute, now)
                raise too_many_tokens(tenant, per_minute, used, tokens, wait)
            self._tokens.spend(tokens)
        self.reserved += tokens

    def settle(self, tenant: Tenant, reserved: int, used: int) -> None:
        """What was promised becomes what was used: less, or more where the client set no bound."""
        self.reserved -= reserved
        assert self.reserved >= 0, "reserve() comes first"
        if tenant.limits.tokens_per_minute is not None:
            self._tokens.spend(used - reserved)

    def headers(self, tenant: Tenant, routers: int, now: float) -> dict[str, str]:
        """How much is left, as OpenAI's clients read it; nothing for who has no limits."""
        limits = tenant.limits
        told: dict[str, str] = {}
        if limits.requests_per_minute is not None:
            per_minute = max(limits.requests_per_minute / routers, 1.0)
            told |= _headers("requests", self._requests, per_minute, now)
        if limits.tokens_per_minute is not None:
            per_minute = limits.tokens_per_minute / routers
            told |= _headers("tokens", self._tokens, per_minute, now)
        return told

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.reserved == 0

    def _check_tokens_left(
        self, tenant: Tenant, per_minute: float, size_bytes: int, now: float
    ) -> None:
        """A flood must not have its prompts tokenised before it is refused."""
        alike = size_bytes >= self._refused_bytes
        tokens = max(self._refused_tokens, 1) if alike else 1
        wait = self._tokens.wait_seconds(tokens, per_minute, now)
        if wait > 0:
            used = per_minute - self._tokens.remaining(per_minute, now)
            raise too_many_tokens(tenant, per_minute, used, None, wait)
        if alike:
            self._refused_tokens = 0


def _headers(what: str, meter: Meter, per_minute: float, now: float) -> dict[str, str]:
    remaining = max(math.floor(meter.remaining(per_minute, now)), 0)
    return {
        f"x-ratelimit-limit-{what}": str(math.floor(per_minute)),
        f"x-ratelimit-remaining-{what}": str(remaining),
        f"x-ratelimit-reset-{what}": duration(meter.full_seconds(per_minute, now)),
    }
