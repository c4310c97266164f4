"""One tenant's use of its limits at this router."""

import asyncio
import math

from router.tenants.concurrency_limiter import ConcurrencyLimiter
from router.tenants.quota_share import QuotaShare
from router.tenants.quota_store import QuotaGrant, QuotaRequest
from router.tenants.rate_limit_errors import (
    concurrency_exceeded,
    format_duration,
    request_rate_exceeded,
    request_too_large,
    token_rate_exceeded,
)
from router.tenants.rate_limiter import MIN_WAIT_SECONDS, RateLimiter
from router.tenants.tenant import Tenant


class Quota:
    """Counts one tenant's use of its limits. Every :meth:`begin` that does not raise is followed by
    one :meth:`end`, and every :meth:`reserve` by one :meth:`settle`. No method waits: if routers
    share the tenant's limits, quota that this router lacks must first be drawn from the quota store
    (:meth:`build_begin_request`, :meth:`build_token_request`)."""

    __slots__ = ("_refused_bytes", "_refused_tokens", "_requests", "_slots", "_tokens",
                 "exchange_lock", "is_retrying_slot", "reserved_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.reserved_tokens = 0
        """Tokens reserved for requests in progress."""
        self.exchange_lock = asyncio.Lock()
        """Held during an exchange with the quota store, so that there is one at a time."""
        self.is_retrying_slot = False
        """Whether a request is waiting while it asks the quota store for a slot again."""
        self._requests = RateLimiter()
        self._tokens = RateLimiter()
        self._slots = ConcurrencyLimiter()
        self._refused_tokens = 0
        self._refused_bytes = 0
        """The tokens, and the size in bytes, of the last request that was refused because too few
        tokens were left. The tokens are 0 if this no longer matters."""

    def begin(self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float) -> None:
        """Count one more request, before its body is read. If that exceeds a limit, raises
        RateLimited and counts nothing."""
        limits = tenant.limits
        at_once = limits.concurrent_requests
        if at_once is not None and not self._slots.can_begin(at_once, share, now):
            raise concurrency_exceeded(tenant, math.ceil(share.reported_limit(at_once)))
        if limits.tokens_per_minute is not None:
            self._check_tokens_left(tenant, limits.tokens_per_minute, share, size_bytes, now)
        limit = limits.requests_per_minute
        if limit is not None:
            if not self._requests.can_spend(1, limit, share, now):
                wait = max(self._requests.wait_seconds(1, limit, share, now), MIN_WAIT_SECONDS)
                used = share.reported_limit(limit) - self._requests.remaining(limit, share, now)
                raise request_rate_exceeded(tenant, share.reported_limit(limit), used, wait)
            self._requests.spend(1, limit, share, now)
        self._slots.begin()

    def end(self) -> None:
        self._slots.end()

    def reserve(
        self,
        tenant: Tenant,
        share: QuotaShare,
        tokens: int,
        size_bytes: int,
        now: float,
        field: str = "max_tokens",
    ) -> None:
        """Reserve ``tokens`` for a request's prompts and answers. If that exceeds the limit, raises
        RateLimited and reserves nothing. ``size_bytes`` is the size of the request's body and of
        the stored conversation that was read for it. After a refusal because too few tokens are
        left now, :meth:`begin` assumes that any request with a body of at least this size needs as
        many tokens, and refuses it until they are left. ``field`` is the request's field that
        limits an answer's tokens, for errors."""
        limit = tenant.limits.tokens_per_minute
        if limit is not None:
            if tokens > limit:
                raise request_too_large(tenant, limit, tokens, field)
            if not self._tokens.can_spend(tokens, limit, share, now):
                self._refused_tokens, self._refused_bytes = tokens, size_bytes
                wait = max(self._tokens.wait_seconds(tokens, limit, share, now), MIN_WAIT_SECONDS)
                used = share.reported_limit(limit) - self._tokens.remaining(limit, share, now)
                raise token_rate_exceeded(tenant, share.reported_limit(limit), used, tokens, wait)
            self._tokens.spend(tokens, limit, share, now)
        self.reserved_tokens += tokens

    def settle(
        self, tenant: Tenant, share: QuotaShare, reserved: int, used: int, now: float
    ) -> None:
        """Replace ``reserved`` tokens with the ``used`` tokens. There may be fewer used tokens or,
        if the client set no ``max_tokens``, more."""
        self.reserved_tokens -= reserved
        assert self.reserved_tokens >= 0, "reserve() comes first"
        limit = tenant.limits.tokens_per_minute
        if limit is not None:
            self._tokens.spend(used - reserved, limit, share, now)

    def headers(self, tenant: Tenant, share: QuotaShare, now: float) -> dict[str, str]:
        """Return the rate limit headers in OpenAI's format; empty for a tenant without limits per
        minute."""
        limits = tenant.limits
        headers: dict[str, str] = {}
        if limits.requests_per_minute is not None:
            headers |= _rate_limit_headers(
                "requests", self._requests, limits.requests_per_minute, share, now
            )
        if limits.tokens_per_minute is not None:
            headers |= _rate_limit_headers(
                "tokens", self._tokens, limits.tokens_per_minute, share, now
            )
        return headers

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def is_idle(self) -> bool:
        return self.num_running == 0 and self.reserved_tokens == 0

    # -- exchanges with the quota store -------------------------------------------------------

    def can_begin(self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float) -> bool:
        """Whether :meth:`begin` can be called without querying the quota store: this router has the
        quota for one more request, and would not refuse it because of an outdated reply of the
        store."""
        limits = tenant.limits
        requests, at_once = limits.requests_per_minute, limits.concurrent_requests
        return (
            (requests is None or self._requests.can_spend(1, requests, share, now))
            and (at_once is None or self._slots.can_begin(at_once, share, now))
            and not self._is_token_refusal_outdated(tenant, share, size_bytes, now)
        )

    def has_tokens(self, tenant: Tenant, share: QuotaShare, tokens: int, now: float) -> bool:
        limit = tenant.limits.tokens_per_minute
        return limit is None or self._tokens.can_spend(tokens, limit, share, now)

    def build_begin_request(
        self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float, *, again: bool = False
    ) -> QuotaRequest | None:
        """Build the request that asks the quota store for what one more client request needs.
        Return None if nothing is needed, because this router still holds enough of the tenant's
        quota or shares no limits, or if the store has refused a moment ago. If ``again`` is True,
        ask for a slot even after such a refusal."""
        limits, requests, tokens, slots = tenant.limits, None, None, None
        if not share.is_shared:
            return None
        limit = limits.requests_per_minute
        if limit is not None and self._requests.should_request(1, limit, share, now):
            requests = self._requests.build_request(1, limit, share, now)
        limit = limits.concurrent_requests
        if limit is not None and self._slots.should_request_slot(limit, share, now, again=again):
            slots = self._slots.build_slot_request(limit, share)
        limit = limits.tokens_per_minute
        if limit is not None and self._is_token_refusal_outdated(tenant, share, size_bytes, now):
            tokens = self._tokens.build_query(limit, now)
        if requests is None and tokens is None and slots is None:
            return None
        return QuotaRequest(tenant.id, share.num_routers, requests, tokens, slots)

    def build_token_request(
        self, tenant: Tenant, share: QuotaShare, tokens: int, now: float
    ) -> QuotaRequest | None:
        """Build the request to the quota store for ``tokens`` tokens. Return None if this router
        has them, if the store has just refused them, if they exceed the whole limit, or if there is
        no limit that routers share."""
        limit = tenant.limits.tokens_per_minute
        if limit is None or tokens > limit or not share.is_shared:
            return None
        if not self._tokens.should_request(tokens, limit, share, now):
            return None
        draw = self._tokens.build_request(tokens, limit, share, now)
        return QuotaRequest(tenant.id, share.num_routers, None, draw, None)

    def build_maintenance_request(
        self, tenant: Tenant, share: QuotaShare, now: float, *, is_turn: bool
    ) -> QuotaRequest | None:
        """Build the request, sent in the background, that settles and refills the quota; None if
        there is nothing to do. ``is_turn`` is True in the periodic exchange with the quota store,
        which also returns unused requests and tokens per minute and renews the lease of slots; it
        is False in an early exchange."""
        limits = tenant.limits
        requests = tokens = slots = None
        if limits.requests_per_minute is not None:
            limit = limits.requests_per_minute
            requests = self._requests.build_maintenance_request(limit, share, now, is_turn=is_turn)
        if limits.tokens_per_minute is not None:
            limit = limits.tokens_per_minute
            tokens = self._tokens.build_maintenance_request(limit, share, now, is_turn=is_turn)
        if limits.concurrent_requests is not None:
            limit = limits.concurrent_requests
            slots = self._slots.build_maintenance_request(limit, share, now, is_turn=is_turn)
        if requests is None and tokens is None and slots is None:
            return None
        return QuotaRequest(tenant.id, share.num_routers, requests, tokens, slots)

    def record_grant(self, request: QuotaRequest, grant: QuotaGrant, now: float) -> None:
        """Record the quota store's answer to the last request."""
        if request.requests is not None:
            self._requests.record_grant(grant.requests, now)
        if request.tokens is not None:
            self._tokens.record_grant(grant.tokens, now)
        if request.slots is not None:
            self._slots.record_grant(request.slots, grant.num_slots, now)

    def needs_early_exchange(self, tenant: Tenant, share: QuotaShare, now: float) -> bool:
        """Whether to exchange with the quota store before the next periodic exchange."""
        limits = tenant.limits
        if limits.concurrent_requests is not None and self._slots.has_surplus:
            return True
        pairs = (
            (self._requests, limits.requests_per_minute),
            (self._tokens, limits.tokens_per_minute),
        )
        return any(
            limit is not None and limiter.needs_refill(limit, share, now)
            for limiter, limit in pairs
        )

    @property
    def has_free_slot(self) -> bool:
        return self._slots.has_free_slot

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to exchange with the quota store before the tenant's next
        request."""
        return self._requests.is_settled and self._tokens.is_settled and self._slots.is_empty

    def _check_tokens_left(
        self, tenant: Tenant, limit: int, share: QuotaShare, size_bytes: int, now: float
    ) -> None:
        """Raise RateLimited if too few tokens are left for the request, judged by the size of its
        body, so that the router need not tokenise its prompt."""
        wait = self._tokens.wait_seconds(self._min_tokens(size_bytes), limit, share, now)
        if wait > 0:
            used = share.reported_limit(limit) - self._tokens.remaining(limit, share, now)
            raise token_rate_exceeded(tenant, share.reported_limit(limit), used, None, wait)
        if size_bytes >= self._refused_bytes:
            self._refused_tokens = 0

    def _is_token_refusal_outdated(
        self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float
    ) -> bool:
        """Whether a request would be refused before its body is read, but only because of an
        outdated reply of the quota store."""
        limit = tenant.limits.tokens_per_minute
        if limit is None or not share.is_shared:
            return False
        amount = self._min_tokens(size_bytes)
        wait = self._tokens.wait_seconds(amount, limit, share, now)
        return wait > 0 and self._tokens.should_request(amount, limit, share, now)

    def _min_tokens(self, size_bytes: int) -> int:
        """Return the fewest tokens that a request is assumed to need, before its body is read. If
        the body is at least as large as the last refused request, this is that request's number of
        tokens; otherwise it is 1."""
        return max(self._refused_tokens, 1) if size_bytes >= self._refused_bytes else 1


def _rate_limit_headers(
    what: str, limiter: RateLimiter, limit: int, share: QuotaShare, now: float
) -> dict[str, str]:
    remaining, total = limiter.remaining(limit, share, now), share.reported_limit(limit)
    return {
        f"x-ratelimit-limit-{what}": str(math.floor(total)),
        f"x-ratelimit-remaining-{what}": str(max(math.floor(remaining), 0)),
        f"x-ratelimit-reset-{what}": format_duration((total - remaining) * 60 / total),
    }
