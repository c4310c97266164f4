"""What one tenant has used of its limits, at this router."""

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
    """Every :meth:`begin` that does not raise is followed by one :meth:`end`, and so is every
    :meth:`reserve` by one :meth:`settle`. Where routers share the tenant's limits, what
    :meth:`lacks` says is asked of the treasury first: nothing here waits."""

    __slots__ = ("_refused_bytes", "_refused_tokens", "_requests", "_seats", "_tokens",
                 "exchanging", "is_looking", "reserved")  # fmt: skip

    def __init__(self) -> None:
        self.reserved = 0
        """Tokens that requests under way were promised."""
        self.exchanging = asyncio.Lock()
        """Held while the treasury is asked: for one thing at a time."""
        self.is_looking = False
        """A request waits for a seat that may come any moment."""
        self._requests = RateLimiter()
        self._tokens = RateLimiter()
        self._seats = ConcurrencyLimiter()
        self._refused_tokens = 0
        self._refused_bytes = 0
        """Of the last request that was refused for its tokens."""

    def begin(self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float) -> None:
        """One more request, before its body is read. Raises RateLimited, and costs nothing then."""
        limits = tenant.limits
        at_once = limits.concurrent_requests
        if at_once is not None and not self._seats.covers(at_once, share, now):
            raise concurrency_exceeded(tenant, math.ceil(share.told(at_once)))
        if limits.tokens_per_minute is not None:
            self._check_tokens_left(tenant, limits.tokens_per_minute, share, size_bytes, now)
        limit = limits.requests_per_minute
        if limit is not None:
            if not self._requests.covers(1, limit, share, now):
                wait = max(self._requests.wait_seconds(1, limit, share, now), MIN_WAIT_SECONDS)
                used = share.told(limit) - self._requests.remaining(limit, share, now)
                raise request_rate_exceeded(tenant, share.told(limit), used, wait)
            self._requests.spend(1, limit, share, now)
        self._seats.take()

    def end(self) -> None:
        self._seats.give()

    def reserve(
        self, tenant: Tenant, share: QuotaShare, tokens: int, size_bytes: int, now: float
    ) -> None:
        """Of a prompt and the answer that it may get. Raises RateLimited, and costs nothing then.
        Requests at least as large are not looked at before this one could have come in."""
        limit = tenant.limits.tokens_per_minute
        if limit is not None:
            if tokens > limit:
                raise request_too_large(tenant, limit, tokens)
            if not self._tokens.covers(tokens, limit, share, now):
                self._refused_tokens, self._refused_bytes = tokens, size_bytes
                wait = max(self._tokens.wait_seconds(tokens, limit, share, now), MIN_WAIT_SECONDS)
                used = share.told(limit) - self._tokens.remaining(limit, share, now)
                raise token_rate_exceeded(tenant, share.told(limit), used, tokens, wait)
            self._tokens.spend(tokens, limit, share, now)
        self.reserved += tokens

    def settle(
        self, tenant: Tenant, share: QuotaShare, reserved: int, used: int, now: float
    ) -> None:
        """What was promised becomes what was used: less, or more where the client set no bound."""
        self.reserved -= reserved
        assert self.reserved >= 0, "reserve() comes first"
        limit = tenant.limits.tokens_per_minute
        if limit is not None:
            self._tokens.spend(used - reserved, limit, share, now)

    def headers(self, tenant: Tenant, share: QuotaShare, now: float) -> dict[str, str]:
        """How much is left, as OpenAI's clients read it; nothing for who has no limits."""
        limits = tenant.limits
        told: dict[str, str] = {}
        if limits.requests_per_minute is not None:
            told |= _rate_limit_headers(
                "requests", self._requests, limits.requests_per_minute, share, now
            )
        if limits.tokens_per_minute is not None:
            told |= _rate_limit_headers(
                "tokens", self._tokens, limits.tokens_per_minute, share, now
            )
        return told

    @property
    def running(self) -> int:
        return self._seats.running

    @property
    def is_idle(self) -> bool:
        return self.running == 0 and self.reserved == 0

    # -- with the treasury --------------------------------------------------------------------

    def has_for_one(self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float) -> bool:
        """Whether this router has what one more request takes."""
        limits = tenant.limits
        requests, at_once = limits.requests_per_minute, limits.concurrent_requests
        return (
            (requests is None or self._requests.covers(1, requests, share, now))
            and (at_once is None or self._seats.covers(at_once, share, now))
            and not self._doubts_tokens(tenant, share, size_bytes, now)
        )

    def has_tokens(self, tenant: Tenant, share: QuotaShare, tokens: int, now: float) -> bool:
        limit = tenant.limits.tokens_per_minute
        return limit is None or self._tokens.covers(tokens, limit, share, now)

    def ask_to_begin(
        self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float, *, again: bool = False
    ) -> QuotaRequest | None:
        """For one more request. None: this router has what it takes, or there is none to be had,
        or it is by itself. ``again``: although there was no seat just now."""
        limits, draw, look, hold = tenant.limits, None, None, None
        if not share.is_common:
            return None
        limit = limits.requests_per_minute
        if limit is not None and self._requests.asks_for(1, limit, share, now):
            draw = self._requests.draw(1, limit, share, now)
        limit = limits.concurrent_requests
        if limit is not None and self._seats.asks(limit, share, now, again=again):
            hold = self._seats.one_more(limit, share)
        limit = limits.tokens_per_minute
        if limit is not None and self._doubts_tokens(tenant, share, size_bytes, now):
            look = self._tokens.look(limit, now)
        if draw is None and look is None and hold is None:
            return None
        return QuotaRequest(tenant.id, share.num_routers, draw, look, hold)

    def ask_for_tokens(
        self, tenant: Tenant, share: QuotaShare, tokens: int, now: float
    ) -> QuotaRequest | None:
        """None: as above."""
        limit = tenant.limits.tokens_per_minute
        if limit is None or tokens > limit or not share.is_common:
            return None
        if not self._tokens.asks_for(tokens, limit, share, now):
            return None
        draw = self._tokens.draw(tokens, limit, share, now)
        return QuotaRequest(tenant.id, share.num_routers, None, draw, None)

    def upkeep(
        self, tenant: Tenant, share: QuotaShare, now: float, *, is_turn: bool
    ) -> QuotaRequest | None:
        """What the treasury is to be told or asked while nobody waits for it."""
        limits = tenant.limits
        requests = tokens = hold = None
        if limits.requests_per_minute is not None:
            limit = limits.requests_per_minute
            requests = self._requests.upkeep(limit, share, now, is_turn=is_turn)
        if limits.tokens_per_minute is not None:
            limit = limits.tokens_per_minute
            tokens = self._tokens.upkeep(limit, share, now, is_turn=is_turn)
        if limits.concurrent_requests is not None:
            limit = limits.concurrent_requests
            hold = self._seats.upkeep(limit, share, now, is_turn=is_turn)
        if requests is None and tokens is None and hold is None:
            return None
        return QuotaRequest(tenant.id, share.num_routers, requests, tokens, hold)

    def note(self, ask: QuotaRequest, grant: QuotaGrant, now: float) -> None:
        """The treasury has done what it was asked last."""
        if ask.requests is not None:
            self._requests.note(grant.requests, now)
        if ask.tokens is not None:
            self._tokens.note(grant.tokens, now)
        if ask.hold is not None:
            self._seats.note(ask.hold, grant.seats, now)

    def is_due(self, tenant: Tenant, share: QuotaShare, now: float) -> bool:
        """Whether the treasury should hear from it before its next turn."""
        limits = tenant.limits
        if limits.concurrent_requests is not None and self._seats.has_surplus:
            return True
        pairs = (
            (self._requests, limits.requests_per_minute),
            (self._tokens, limits.tokens_per_minute),
        )
        return any(
            limit is not None and purse.runs_low(limit, share, now) for purse, limit in pairs
        )

    @property
    def has_seat(self) -> bool:
        return self._seats.has_any

    @property
    def is_closed(self) -> bool:
        """Whether the treasury need not hear of it before it is used again."""
        return self._requests.is_empty and self._tokens.is_empty and self._seats.is_empty

    def _check_tokens_left(
        self, tenant: Tenant, limit: int, share: QuotaShare, size_bytes: int, now: float
    ) -> None:
        """A flood must not have its prompts tokenised before it is refused."""
        wait = self._tokens.wait_seconds(self._least_tokens(size_bytes), limit, share, now)
        if wait > 0:
            used = share.told(limit) - self._tokens.remaining(limit, share, now)
            raise token_rate_exceeded(tenant, share.told(limit), used, None, wait)
        if size_bytes >= self._refused_bytes:
            self._refused_tokens = 0

    def _doubts_tokens(
        self, tenant: Tenant, share: QuotaShare, size_bytes: int, now: float
    ) -> bool:
        """Whether a request would be refused unread for what was known a while ago."""
        limit = tenant.limits.tokens_per_minute
        if limit is None or not share.is_common:
            return False
        amount = self._least_tokens(size_bytes)
        wait = self._tokens.wait_seconds(amount, limit, share, now)
        return wait > 0 and self._tokens.asks_for(amount, limit, share, now)

    def _least_tokens(self, size_bytes: int) -> int:
        """That a request of this size takes, as far as is known before it is read."""
        return max(self._refused_tokens, 1) if size_bytes >= self._refused_bytes else 1


def _rate_limit_headers(
    what: str, purse: RateLimiter, limit: int, share: QuotaShare, now: float
) -> dict[str, str]:
    remaining, told = purse.remaining(limit, share, now), share.told(limit)
    return {
        f"x-ratelimit-limit-{what}": str(math.floor(told)),
        f"x-ratelimit-remaining-{what}": str(max(math.floor(remaining), 0)),
        f"x-ratelimit-reset-{what}": format_duration((told - remaining) * 60 / told),
    }
