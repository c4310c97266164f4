"""The index in Redis. Each block has a hash that maps nodes to their generation and tier.

A hash expires 24 hours after a node was last added to it, and nodes that have left are removed from
it when another node is added. A registration lasts 24 hours; a node that still runs then registers
again and adds all its blocks.
"""

import re
from collections.abc import Sequence
from typing import Any

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier
from baton.errors import Unavailable
from baton.kv.index import KvHolder, PrefixHit, bisect_prefix
from baton.registry.redis_client import call_redis, connect_redis

ENTRY_SECONDS = 24 * 3600
BATCH_KEYS = 1024
"""Number of keys in one call, which takes some 10 ms of the event loop."""

_PLACE = re.compile(rb"([0-9]{1,20}) ([12])")
"""The form of a value in an entry's hash: generation (64 bits) and tier. Others are ignored."""

# KEYS: entries. ARGV: node, its place, lifetime of an entry in seconds, prefix of registrations.
# Of each entry, up to 4 random fields are checked, so that the time does not depend on the number
# of nodes. A node whose registration has expired adds its blocks again when it registers.
_ADD = """
local registered = {}
local function is_registered(node, place)
  local name = node .. ':' .. (string.match(place, '^%d+') or '')
  if registered[name] == nil then
    registered[name] = redis.call('EXISTS', ARGV[4] .. name) == 1
  end
  return registered[name]
end
for _, entry in ipairs(KEYS) do
  redis.call('HSET', entry, ARGV[1], ARGV[2])
  redis.call('EXPIRE', entry, ARGV[3])
  if redis.call('HLEN', entry) > 1 then
    local fields = redis.call('HRANDFIELD', entry, 4, 'WITHVALUES')
    for i = 1, #fields, 2 do
      if fields[i] ~= ARGV[1] and not is_registered(fields[i], fields[i + 1]) then
        redis.call('HDEL', entry, fields[i])
      end
    end
  end
end
"""

# KEYS: entries. ARGV: node, generation and a space.
_REMOVE = """
for _, entry in ipairs(KEYS) do
  local place = redis.call('HGET', entry, ARGV[1])
  if place and string.sub(place, 1, #ARGV[2]) == ARGV[2] then
    redis.call('HDEL', entry, ARGV[1])
  end
end
"""


class RedisKvIndex:
    def __init__(self, url: str, cluster: str) -> None:
        self._url = url
        self._redis = connect_redis(url)
        self._prefix = f"baton:{cluster}:kv:".encode()
        self._registrations = f"baton:{cluster}:kv-holder:"

    async def add(self, holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        place = f"{holder.generation} {tier:d}"
        await self._run(_ADD, keys, holder.node, place, ENTRY_SECONDS, self._registrations)

    async def remove(self, holder: KvHolder, keys: Sequence[BlockKey]) -> None:
        await self._run(_REMOVE, keys, holder.node, f"{holder.generation} ")

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        return await bisect_prefix(keys, self.holders)

    async def holders(self, key: BlockKey) -> dict[KvHolder, Tier]:
        try:
            raw = await self._call(self._redis.hgetall(self._entry(key)))
        except Unavailable as error:
            if "WRONGTYPE" in str(error):  # the key was written by another program
                return {}
            raise
        holders = {}
        for node, place in sorted(raw.items()):
            match = _PLACE.fullmatch(place)
            if match is not None:
                name = WorkerId(node.decode("utf-8", "replace"))
                holders[KvHolder(name, Incarnation(int(match[1])))] = Tier(int(match[2]))
        return holders

    async def register_holder(self, holder: KvHolder) -> bool:
        name = f"{self._registrations}{holder.node}:{holder.generation}"
        return not await self._call(self._redis.set(name, 1, nx=True, ex=ENTRY_SECONDS))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: str, keys: Sequence[BlockKey], *arguments: str | int) -> None:
        """Run a script over the entries of ``keys``, in batches."""
        for start in range(0, len(keys), BATCH_KEYS):
            entries = [self._entry(key) for key in keys[start : start + BATCH_KEYS]]
            await self._call(self._redis.eval(script, len(entries), *entries, *arguments))

    def _entry(self, key: BlockKey) -> bytes:
        return self._prefix + key

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, call)
