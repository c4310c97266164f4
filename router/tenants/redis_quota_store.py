"""The quota store in Redis. Each tenant with limits has a hash, which contains its leaky buckets
and is removed after they are empty."""

import math
from collections.abc import Sequence
from typing import Any, cast

from baton.errors import Unavailable
from baton.registry.redis_client import call_redis, connect_redis
from baton.registry.redis_scripts import KEEP
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
"""The timeout of an exchange. A client's request may wait for it, so a slower Redis counts as
unreachable for a while."""

PING_TIMEOUT_SECONDS = 2.0

KEY_TTL_SECONDS = 120
"""How long a tenant's hash is kept after its last use: by then, its buckets are empty and its
leases have ended. If more was used than allowed, the hash is kept longer."""

# KEYS: the tenant's hash, the index of ends. ARGV: the router, the number of routers, then for
# requests and for tokens the limit per minute ('' for none), settled, least and most; then the
# limit of slots ('' for none), running and wanted; then 1 if the router requests more quota, else
# 0. Times are Redis's own, in milliseconds. A bucket is stored as "SPENT AT": the amount that was
# spent and had not drained at the time AT.
_EXCHANGE = f"""{KEEP}
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
keep(KEYS[2], key, kept_seconds)
return {{requests, requests_left, tokens, tokens_left, seats}}
"""


class RedisQuotaStore:
    """Implements :class:`router.tenants.quota_store.QuotaStore`. All keys begin with
    ``baton:CLUSTER:limits:``."""

    def __init__(
        self, url: str, cluster: str, exchange_seconds: float = SYNC_TIMEOUT_SECONDS
    ) -> None:
        self._seconds = exchange_seconds
        self._url = url
        self._redis = connect_redis(url)
        self._prefix = f"baton:{cluster}:limits:"
        self._ends = f"baton:{cluster}:limit-ends"

    async def exchange(self, router: str, requests: Sequence[QuotaRequest]) -> list[QuotaGrant]:
        pipe = self._redis.pipeline(transaction=False)
        for request in requests:
            keys = (self._prefix + request.tenant, self._ends)
            pipe.eval(_EXCHANGE, len(keys), *keys, *_arguments(router, request))
        replies = await call_redis(self._url, cast(Any, pipe.execute()), self._seconds)
        pairs = zip(requests, replies, strict=True)
        return [_parse_grant(request, reply) for request, reply in pairs]

    async def ping(self) -> None:
        await call_redis(self._url, cast(Any, self._redis.ping()), PING_TIMEOUT_SECONDS)

    async def close(self) -> None:
        await self._redis.aclose()


def _arguments(router: str, request: QuotaRequest) -> list[str | int]:
    slots = request.slots
    slot_arguments = (
        [slots.limit, slots.num_running, slots.num_wanted] if slots is not None else ["", 0, 0]
    )
    rate_arguments = [*_rate_arguments(request.requests), *_rate_arguments(request.tokens)]
    return [
        router,
        request.num_routers,
        *rate_arguments,
        *slot_arguments,
        int(request.requests_more),
    ]


def _rate_arguments(request: RateRequest | None) -> list[str | int]:
    if request is None:
        return ["", 0, 0, 0]
    return [request.per_minute, request.settled, request.min_amount, request.max_amount]


def _parse_grant(request: QuotaRequest, reply: Sequence[Any]) -> QuotaGrant:
    """Parse a reply. Raises Unavailable for an impossible grant, which means that something else
    has written to the tenant's hash."""
    try:
        requests, requests_left, tokens, tokens_left, seats = reply
        grants = [
            _parse_rate_grant("requests", request.requests, requests, requests_left),
            _parse_rate_grant("tokens", request.tokens, tokens, tokens_left),
        ]
        wanted = (
            max(request.slots.num_running, request.slots.num_wanted)
            if request.slots is not None
            else 0
        )
        if not 0 <= seats <= wanted:
            raise ValueError(f"{seats} slots were granted (expected: 0 to {wanted})")
    except (ValueError, TypeError, OverflowError) as error:
        raise Unavailable(
            f"Redis holds invalid quota data for tenant {request.tenant}: {error}"
        ) from error
    return QuotaGrant(grants[0], grants[1], int(seats))


def _parse_rate_grant(unit: str, request: RateRequest | None, granted: Any, left: Any) -> RateGrant:
    """Parse the grant for one of the limits per minute. Raises ValueError or TypeError if the
    values are impossible."""
    grant = RateGrant(int(granted), float(left))
    most = max(request.min_amount, request.max_amount) if request is not None else 0
    if not (0 <= grant.granted <= most and math.isfinite(grant.remaining)):
        raise ValueError(
            f"{granted} {unit} were granted (expected: 0 to {most}), and {left} are left of the "
            "limit per minute (expected: a finite number)"
        )
    return grant
