"""The response store in Redis, which all routers share."""

from typing import Any, cast

from baton.core.ids import TenantId
from baton.registry.redis_client import call_redis, connect_redis
from baton.registry.redis_scripts import RedisScripts
from router.responses.response_json import (
    EncodedResponse,
    encode_stored,
    is_response_id,
    read_encoded,
)
from router.responses.response_keys import tenant_prefix
from router.responses.response_limits import ResponseLimits
from router.responses.stored_response import StoredResponse

_MAX_REMOVED = 500
"""How many responses one run of the script removes: about 5 ms of Redis's time."""

# Each response has a key that expires. Two more keys per tenant index them: a sorted set of ids by
# the time of expiry (in microseconds, by Redis's own clock), which is also their order, and a hash
# of their sizes, whose field '' is the sum. Redis may evict any of these keys when its memory is
# full: a response without its key is missing, and without the set, the sizes count no more.
_REMOVE = """
local order, sizes, prefix = KEYS[1], KEYS[2], ARGV[1]
local function remove(id)
  local size = tonumber(redis.call('HGET', sizes, id) or '0')
  redis.call('HINCRBY', sizes, '', 0 - size)
  redis.call('HDEL', sizes, id)
  redis.call('ZREM', order, id)
  return redis.call('DEL', prefix .. id)
end
"""

# ARGV: the beginning of the responses' keys, the id, the JSON, its size, the milliseconds until it
# expires, the limits in bytes and number, then 1 if the id must exist. Returns 0 if it must exist
# and does not, 1 if the response is stored, and -1 if more must be removed first: Redis serves
# nobody while a script runs, so that one call removes at most _MAX_REMOVED.
_PUT = f"""{_REMOVE}
local id, size, ttl = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local max_bytes, max_number = tonumber(ARGV[6]), tonumber(ARGV[7])
local exists = redis.call('EXISTS', prefix .. id)
if ARGV[8] == '1' and exists == 0 then return 0 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local expires = string.format('%.0f', now + ttl * 1000)
if redis.call('ZCARD', order) == 0 then redis.call('DEL', sizes) end
redis.call('ZADD', order, 'XX', expires, id)  -- it is the newest now, so it is removed last
local function is_full()
  local own = redis.call('HGET', sizes, id)
  local total = tonumber(redis.call('HGET', sizes, '') or '0') - tonumber(own or '0')
  local number = redis.call('ZCARD', order) - (redis.call('ZSCORE', order, id) and 1 or 0)
  return total + size > max_bytes or number + 1 > max_number
end
for removed = 0, {_MAX_REMOVED} do
  local oldest = redis.call('ZRANGE', order, 0, 0, 'WITHSCORES')
  if not oldest[1] or oldest[1] == id then break end
  local is_expired = tonumber(oldest[2]) <= now
  if not is_expired and not is_full() then break end
  if removed == {_MAX_REMOVED} then
    if is_full() then return -1 end
    break
  end
  remove(oldest[1])
end
remove(id)
redis.call('SET', prefix .. id, ARGV[3], 'PX', ttl)
redis.call('ZADD', order, expires, id)
redis.call('HSET', sizes, id, size)
redis.call('HINCRBY', sizes, '', size)
redis.call('PEXPIRE', order, ttl)
redis.call('PEXPIRE', sizes, ttl)
return 1
"""

_MORE = -1
"""The reply of ``_PUT`` that asks for another call."""

_DELETE = f"{_REMOVE} return remove(ARGV[2])"


class RedisResponseStore:
    """Implements :class:`router.responses.response_store.ResponseStore`. All keys begin with
    ``baton:CLUSTER:responses:TENANT:``."""

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
            int(must_exist),
        )
        while (reply := await self._eval(_PUT, tenant, *arguments)) == _MORE:
            pass
        return bool(reply)

    async def _eval(self, script: str, tenant: TenantId, *arguments: Any) -> Any:
        prefix = tenant_prefix(self._cluster, tenant)
        keys = (f"{prefix}order", f"{prefix}sizes")
        values = self._value_prefix(tenant)
        return await self._scripts.run(script, keys, (values, *arguments))

    def _value_prefix(self, tenant: TenantId) -> str:
        return f"{tenant_prefix(self._cluster, tenant)}response:"

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))
