"""The treasury in Redis: a hash per tenant with limits, gone when all has drained."""

import math
from collections.abc import Sequence
from typing import Any, cast

from baton.errors import Unavailable
from baton.registry.redis_client import call_redis, connect_redis
from router.tenants.quota_store import (
    CONTENTION_SECONDS,
    LEASE_SECONDS,
    RESERVE_DIVISOR,
    ROUNDING,
    QuotaGrant,
    QuotaRequest,
    RateGrant,
    RateRequest,
)

SYNC_TIMEOUT_SECONDS = 1.0
"""A request may wait for it: a Redis that takes longer is not asked for a while."""

PING_TIMEOUT_SECONDS = 2.0

KEY_TTL_SECONDS = 120
"""A limit per minute has drained after one, and a lease has ended; debts are paid off longer."""

# KEYS: the tenant's hash. ARGV: the router, how many there are, requests' and then tokens' limit
# per minute ('' for none), settled, least and most; the limit of seats ('' for none), running and
# wanted. Times are Redis's own, in milliseconds. A meter is written as "spent at".
_EXCHANGE = f"""
local key, me, routers = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000
local flat, fields = redis.call('HGETALL', key), {{}}
for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
local kept_seconds = {KEY_TTL_SECONDS}

local function number(field) return tonumber(fields[field] or '') or 0 end
local function spent_of(field, per_minute)
  local spent, at = string.match(fields[field] or '', '^(%S+) (%S+)$')
  spent, at = tonumber(spent or '0') or 0, tonumber(at or '0') or 0
  return math.max(spent - math.max(now - at, 0) * per_minute / 60000, 0)
end
local function write(field, spent)
  redis.call('HSET', key, field, string.format('%.6f %.3f', spent, now))
end

local contested, taken = false, 0
for field, value in pairs(fields) do
  local id = string.match(field, '^seen:(.*)$')
  if id and id ~= me then
    if now - (tonumber(value) or 0) > {LEASE_SECONDS * 1000} then
      redis.call('HDEL', key, field, 'drew:' .. id, 'seats:' .. id, 'requests:' .. id,
                 'tokens:' .. id)
    else
      contested = contested or now - number('drew:' .. id) <= {CONTENTION_SECONDS * 1000}
      taken = taken + number('seats:' .. id)
    end
  end
end

local function draw(name, first)
  local limit = tonumber(ARGV[first])
  if not limit then return 0, '0' end
  local settled, least, most = tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2]),
                               tonumber(ARGV[first + 3])
  local share, own_name = limit / routers, name .. ':' .. me
  local spent = math.max(spent_of(name, limit) + settled, 0)
  local own = spent_of(own_name, share)
  local left, granted = limit - spent, 0
  if contested and own >= share then left = left - limit / {RESERVE_DIVISOR} end
  if left + {ROUNDING} >= least then
    local spare = math.floor(math.max(left - least, 0) / (2 * routers))
    granted = least + math.min(most - least, spare)
  end
  write(name, spent + granted)
  write(own_name, math.max(own + settled, 0) + granted)
  kept_seconds = math.max(kept_seconds, math.ceil(60 * (spent + granted) / limit) + 60)
  return granted, string.format('%.6f', left - granted)
end

local requests, requests_left = draw('requests', 3)
local tokens, tokens_left = draw('tokens', 7)
local seats, limit = 0, tonumber(ARGV[11])
if limit then
  local running, wanted = tonumber(ARGV[12]), tonumber(ARGV[13])
  local free = limit - taken
  if contested and running * routers >= limit then
    free = free - math.floor(limit / {RESERVE_DIVISOR})
  end
  seats = math.max(running, math.min(wanted, free))
  redis.call('HSET', key, 'seats:' .. me, seats)
end
redis.call('HSET', key, 'seen:' .. me, string.format('%.3f', now))
if ARGV[14] == '1' then redis.call('HSET', key, 'drew:' .. me, string.format('%.3f', now)) end
redis.call('EXPIRE', key, kept_seconds)
return {{requests, requests_left, tokens, tokens_left, seats}}
"""


class RedisQuotaStore:
    """Implements :class:`router.tenants.quota_store.QuotaStore`, in the namespace ``cluster``."""

    def __init__(
        self, url: str, cluster: str, exchange_seconds: float = SYNC_TIMEOUT_SECONDS
    ) -> None:
        self._seconds = exchange_seconds
        self._url = url
        self._redis = connect_redis(url)
        self._prefix = f"baton:{cluster}:limits:"

    async def exchange(self, router: str, asks: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        pipe = self._redis.pipeline(transaction=False)
        for ask in asks:
            pipe.eval(_EXCHANGE, 1, self._prefix + ask.tenant, *_arguments(router, ask))
        told = await call_redis(self._url, cast(Any, pipe.execute()), self._seconds)
        return [_parse_grant(ask, each) for ask, each in zip(asks, told, strict=True)]

    async def ping(self) -> None:
        await call_redis(self._url, cast(Any, self._redis.ping()), PING_TIMEOUT_SECONDS)

    async def close(self) -> None:
        await self._redis.aclose()


def _arguments(router: str, ask: QuotaRequest) -> list[str | int]:
    hold = ask.hold
    held = [hold.limit, hold.running, hold.wanted] if hold is not None else ["", 0, 0]
    drawn = [*_rate_arguments(ask.requests), *_rate_arguments(ask.tokens)]
    return [router, ask.num_routers, *drawn, *held, int(ask.draws)]


def _rate_arguments(draw: RateRequest | None) -> list[str | int]:
    if draw is None:
        return ["", 0, 0, 0]
    return [draw.per_minute, draw.settled, draw.least, draw.most]


def _parse_grant(ask: QuotaRequest, told: Sequence[Any]) -> QuotaGrant:
    """Raises Unavailable for what can't be granted: somebody else has written to the tenant's
    hash."""
    try:
        requests, requests_left, tokens, tokens_left, seats = told
        drawn = [
            _parse_rate_grant(ask.requests, requests, requests_left),
            _parse_rate_grant(ask.tokens, tokens, tokens_left),
        ]
        wanted = max(ask.hold.running, ask.hold.wanted) if ask.hold is not None else 0
        if not 0 <= seats <= wanted:
            raise ValueError(f"{seats} of {wanted} seats")
    except (ValueError, TypeError, OverflowError) as error:
        raise Unavailable(
            f"Redis holds no limits of {ask.tenant}'s that make sense: {error}"
        ) from error
    return QuotaGrant(drawn[0], drawn[1], int(seats))


def _parse_rate_grant(draw: RateRequest | None, granted: Any, left: Any) -> RateGrant:
    """Raises ValueError, TypeError."""
    made = RateGrant(int(granted), float(left))
    most = max(draw.least, draw.most) if draw is not None else 0
    if not (0 <= made.granted <= most and math.isfinite(made.left)):
        raise ValueError(f"{granted} of {most} granted, {left} left")
    return made
