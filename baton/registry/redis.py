"""The registry in Redis: one key per member that expires with its lease, and a set of ids."""

import secrets
from typing import Any, cast

import structlog

from baton.core.ids import Generation, WorkerId
from baton.core.member import Member
from baton.errors import Invalid
from baton.registry.base import MAX_MEMBERS
from baton.registry.codec import member_from_json, member_to_json
from baton.registry.redis_url import bounded, connect

# What is no member, or has no generation that could be (64 bits), is older than any.
_IS_NEWER = """
local function is_newer(key, generation)
  local present = redis.pcall('GET', key)
  local ok, member = pcall(cjson.decode, present)
  local other = ok and type(member) == 'table' and tonumber(member.generation)
  return other and other < 2 ^ 64 and other > tonumber(generation)
end
"""
# KEYS: the member, the set of ids. ARGV: JSON, generation, ttl in ms, id.
_ANNOUNCE = f"""{_IS_NEWER}
if is_newer(KEYS[1], ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return 1
"""
# KEYS as above. ARGV: generation, id.
_WITHDRAW = f"""{_IS_NEWER}
if is_newer(KEYS[1], ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""

log = structlog.get_logger(__name__)


class RedisRegistry:
    """Over Redis or Valkey, in the namespace ``cluster``."""

    def __init__(self, url: str, cluster: str) -> None:
        self._url = url
        self._redis = connect(url)
        self._prefix = f"baton:{cluster}:member:"
        self._ids = f"baton:{cluster}:members"
        self._memory = f"baton:{cluster}:memory"
        self.incarnation = ""

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        arguments = [
            member_to_json(member),
            str(member.generation),
            str(round(ttl_seconds * 1000)),
            member.id,
        ]
        return bool(await self._script(_ANNOUNCE, member.id, arguments))

    async def withdraw(self, member_id: WorkerId, generation: Generation) -> None:
        await self._script(_WITHDRAW, member_id, [str(generation), member_id])

    async def members(self) -> list[Member]:
        ids = sorted(await self._call(self._redis.smembers(self._ids)))[:MAX_MEMBERS]
        names = [member_id.decode("utf-8", "replace") for member_id in ids]
        keys = [self._prefix + name for name in names]
        *values, memory = await self._call(self._redis.mget([*keys, self._memory]))
        self.incarnation = (memory or await self._name_memory()).decode("utf-8", "replace")
        gone = [member_id for member_id, value in zip(ids, values, strict=True) if value is None]
        if gone:
            await self._call(self._redis.srem(self._ids, *gone))
        found = [_parse(name, value) for name, value in zip(names, values, strict=True) if value]
        return [member for member in found if member is not None]

    async def _name_memory(self) -> bytes:
        """The first one that asks names it."""
        await self._call(self._redis.set(self._memory, secrets.token_hex(8), nx=True))
        name: bytes | None = await self._call(self._redis.get(self._memory))
        return name or b""

    async def ping(self) -> None:
        await self._call(self._redis.ping())

    async def close(self) -> None:
        await self._redis.aclose()

    async def _script(self, script: str, member_id: str, arguments: list[Any]) -> Any:
        keys = [self._prefix + member_id, self._ids]
        return await self._call(self._redis.eval(script, len(keys), *keys, *arguments))

    async def _call(self, call: Any) -> Any:
        return await bounded(self._url, cast(Any, call))


def _parse(name: str, value: bytes) -> Member | None:
    """None, and a line in the log, for what is not the member of that name."""
    try:
        member = member_from_json(value)
    except Invalid as error:
        log.warning("malformed_member", member=name, error=str(error))
        return None
    if member.id != name:
        log.warning("malformed_member", member=name, error=f"it says that it is {member.id}")
        return None
    return member
