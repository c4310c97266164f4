"""The response store in Redis, which all routers share."""

from typing import Any, cast
from urllib.parse import quote

from baton.core.ids import TenantId
from baton.registry.redis_client import call_redis, connect_redis
from baton.registry.redis_scripts import RedisScripts
from router.responses.response_store import ResponseLimits
from router.responses.stored_response import (
    EncodedResponse,
    StoredResponse,
    encode_stored,
    is_response_id,
    read_encoded,
)


def responses_prefix(cluster: str) -> str:
    """Return the beginning of all keys."""
    return f"baton:{cluster}:responses:"


def tenant_prefix(cluster: str, tenant: TenantId) -> str:
    """Return the beginning of a tenant's keys. The tenant is percent-encoded, so that no name of a
    tenant gives access to another tenant's keys."""
    return f"{responses_prefix(cluster)}{quote(tenant, safe='')}:"


_MAX_REMOVED = 500
"""How many responses one run of the script removes: about 5 ms of Redis's time."""

# Each response has a key that expires. Two more keys per tenant index its responses: a sorted set
# of ids by the time of expiry (in microseconds, by Redis's own clock), which is also their order,
# and a hash of their sizes, whose field '' is the sum. Two keys index the tenants, by the beginning
# of their keys: a sorted set by that sum, whose member '' has the negative sum over all tenants,
# and a sorted set by the time when their oldest response expires. The indexes have no TTL, so that
# a Redis with maxmemory-policy volatile-lru evicts none of them: a call of any tenant removes what
# has expired. Redis may lose any of these keys nevertheless: a response without its key is missing,
# and what an index lacks is not counted.
_INDEX = """
local tenants, oldest_of, own = KEYS[1], KEYS[2], ARGV[1]
local function bytes_of(tenant)
  return tonumber(redis.call('HGET', tenant .. 'sizes', '') or '0')
end
-- Write what the indexes of the tenants say about this one.
local function index(tenant)
  local oldest = redis.call('ZRANGE', tenant .. 'order', 0, 0, 'WITHSCORES')
  if not oldest[1] then redis.call('DEL', tenant .. 'sizes') end
  local bytes = bytes_of(tenant)
  local known = tonumber(redis.call('ZSCORE', tenants, tenant) or '0')
  redis.call('ZINCRBY', tenants, known - bytes, '')
  if oldest[1] then
    redis.call('ZADD', tenants, bytes, tenant)
    redis.call('ZADD', oldest_of, oldest[2], tenant)
  else
    redis.call('ZREM', tenants, tenant)
    redis.call('ZREM', oldest_of, tenant)
    if redis.call('ZCARD', oldest_of) == 0 then redis.call('DEL', tenants) end
  end
end
local function remove(tenant, id)
  local size = tonumber(redis.call('HGET', tenant .. 'sizes', id) or '0')
  redis.call('HINCRBY', tenant .. 'sizes', '', 0 - size)
  redis.call('HDEL', tenant .. 'sizes', id)
  redis.call('ZREM', tenant .. 'order', id)
  return redis.call('DEL', tenant .. 'response:' .. id)
end
"""

# ARGV: the beginning of the tenant's keys, the id, the JSON, its size, the milliseconds until it
# expires, the tenant's limits in bytes and number, the limit in bytes for all tenants, then 1 if
# the id must exist. Returns 0 if it must exist and does not, 1 if the response is stored, and -1 if
# more must be removed first: Redis serves nobody while a script runs, so that one call removes at
# most _MAX_REMOVED.
_PUT = f"""{_INDEX}
local order, sizes, id = own .. 'order', own .. 'sizes', ARGV[2]
local size, ttl, max_total = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[8])
if ARGV[9] == '1' and redis.call('EXISTS', own .. 'response:' .. id) == 0 then return 0 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local expires = string.format('%.0f', now + ttl * 1000)
redis.call('ZADD', order, 'XX', expires, id)  -- it is the newest now, so it is removed last
index(own)
local function added_bytes()
  return size - tonumber(redis.call('HGET', sizes, id) or '0')
end
local function has_others()
  local oldest = redis.call('ZRANGE', order, 0, 0)[1]
  return oldest and oldest ~= id
end
local function expired()
  return redis.call('ZRANGEBYSCORE', oldest_of, '-inf', now, 'LIMIT', 0, 1)[1]
end
-- The tenant of which a response must be removed to make room: this one if it exceeds its own
-- limits, else the one with most bytes.
local function fullest()
  local bytes = bytes_of(own) + added_bytes()
  local number = redis.call('ZCARD', order) + (redis.call('ZSCORE', order, id) and 0 or 1)
  if bytes > tonumber(ARGV[6]) or number > tonumber(ARGV[7]) then
    return has_others() and own
  end
  local total = 0 - tonumber(redis.call('ZSCORE', tenants, '') or '0')
  if total + added_bytes() <= max_total then return nil end
  local fullest = redis.call('ZREVRANGE', tenants, 0, 1)  -- member '' is always the last
  local other = fullest[1] ~= own and fullest[1] or fullest[2]
  if other == '' then other = nil end
  if has_others() and not (other and bytes_of(other) > bytes) then return own end
  return other
end
for removed = 0, {_MAX_REMOVED} do
  local tenant = expired() or fullest()
  if not tenant then break end
  if removed == {_MAX_REMOVED} then
    if fullest() then return -1 end
    break
  end
  local oldest = redis.call('ZRANGE', tenant .. 'order', 0, 0)[1]
  if oldest then remove(tenant, oldest) end
  index(tenant)
end
remove(own, id)
redis.call('SET', own .. 'response:' .. id, ARGV[3], 'PX', ttl)
redis.call('ZADD', order, expires, id)
redis.call('HSET', sizes, id, size)
redis.call('HINCRBY', sizes, '', size)
index(own)
return 1
"""

_MORE = -1
"""The reply of ``_PUT`` that asks for another call."""

_DELETE = f"""{_INDEX}
local existed = remove(own, ARGV[2])
index(own)
return existed
"""


class RedisResponseStore:
    """Implements :class:`router.responses.response_store.ResponseStore`. All keys begin with
    ``baton:CLUSTER:responses:``, those of a tenant with ``baton:CLUSTER:responses:TENANT:``."""

    def __init__(self, url: str, cluster: str, limits: ResponseLimits) -> None:
        self._url = url
        self._cluster = cluster
        self._limits = limits
        self._redis = connect_redis(url)
        self._scripts = RedisScripts(url, self._redis)

    async def put(self, tenant: TenantId, stored: StoredResponse) -> None:
        await self._put(tenant, stored, must_exist=False)

    async def replace(self, tenant: TenantId, stored: StoredResponse) -> bool:
        return await self._put(tenant, stored, must_exist=True)

    async def size_bytes(self, tenant: TenantId, response_id: str) -> int:
        if not is_response_id(response_id):
            return 0
        key = self._value_prefix(tenant) + response_id
        return int(await self._call(self._redis.strlen(key)))

    async def get(self, tenant: TenantId, response_id: str) -> EncodedResponse | None:
        if not is_response_id(response_id):
            return None
        key = self._value_prefix(tenant) + response_id
        data = await self._call(self._redis.get(key))
        return read_encoded(data, response_id) if data is not None else None

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        if not is_response_id(response_id):
            return False
        return bool(await self._eval(_DELETE, tenant, response_id))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _put(self, tenant: TenantId, stored: StoredResponse, *, must_exist: bool) -> bool:
        data, limits = encode_stored(stored), self._limits
        arguments = (
            stored.id,
            data,
            limits.check_size(data),
            max(int(limits.ttl_seconds * 1000), 1),
            limits.tenant_bytes,
            limits.tenant_responses,
            limits.total_bytes,
            int(must_exist),
        )
        while (reply := await self._eval(_PUT, tenant, *arguments)) == _MORE:
            pass
        return bool(reply)

    async def _eval(self, script: str, tenant: TenantId, *arguments: Any) -> Any:
        prefix = responses_prefix(self._cluster)
        keys = (f"{prefix}tenants", f"{prefix}oldest")
        own = tenant_prefix(self._cluster, tenant)
        return await self._scripts.run(script, keys, (own, *arguments))

    def _value_prefix(self, tenant: TenantId) -> str:
        return f"{tenant_prefix(self._cluster, tenant)}response:"

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))
