"""The leases of background responses in Redis, which all routers share."""

from collections.abc import Sequence
from typing import Any, cast

from baton.errors import Unavailable
from baton.registry.redis_client import call_redis, connect_redis
from router.responses.redis_response_store import tenant_prefix
from router.responses.response_lease import ENDED_SECONDS, LEASE_SECONDS, LeaseKey, LeaseState

# KEYS: leases. ARGV: for how many milliseconds to take or renew them. A state that no router has
# written counts as none.
_RENEW = """
local states = {}
for i, key in ipairs(KEYS) do
  local state = redis.call('GET', key)
  if state ~= 'ended' then
    if state ~= 'cancelled' then state = 'held' end
    redis.call('SET', key, state, 'PX', ARGV[1])
  end
  states[i] = state
end
return states
"""

_CANCEL = """
local state = redis.call('GET', KEYS[1])
if state ~= 'held' and state ~= 'cancelled' then return 0 end
redis.call('SET', KEYS[1], 'cancelled', 'KEEPTTL')
return 1
"""

# ARGV: for how many milliseconds an ended lease is kept.
_END = """
local state = redis.call('GET', KEYS[1])
if state == 'held' or state == 'cancelled' then return 0 end
redis.call('SET', KEYS[1], 'ended', 'PX', ARGV[1])
return 1
"""


class RedisResponseLeases:
    """Implements :class:`router.responses.response_lease.ResponseLeases`. All keys begin with
    ``baton:CLUSTER:responses:TENANT:lease:``."""

    def __init__(self, url: str, cluster: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._url = url
        self._cluster = cluster
        self._lease_milliseconds = int(lease_seconds * 1000)
        self._redis = connect_redis(url)

    async def renew(self, keys: Sequence[LeaseKey]) -> list[LeaseState]:
        names = [self._name(key) for key in keys]
        states = await self._call(
            self._redis.eval(_RENEW, len(names), *names, self._lease_milliseconds)
        )
        try:
            return [LeaseState(state.decode()) for state in states]
        except (ValueError, AttributeError) as error:
            raise Unavailable(
                "Redis returned an invalid state for the lease of a response"
            ) from error

    async def cancel(self, key: LeaseKey) -> bool:
        return bool(await self._call(self._redis.eval(_CANCEL, 1, self._name(key))))

    async def end_if_lapsed(self, key: LeaseKey) -> bool:
        milliseconds = int(ENDED_SECONDS * 1000)
        return bool(await self._call(self._redis.eval(_END, 1, self._name(key), milliseconds)))

    async def release(self, key: LeaseKey) -> None:
        await self._call(self._redis.delete(self._name(key)))

    async def close(self) -> None:
        await self._redis.aclose()

    def _name(self, key: LeaseKey) -> str:
        return f"{tenant_prefix(self._cluster, key.tenant)}lease:{key.response_id}"

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))
