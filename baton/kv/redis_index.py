"""The index in Redis. Each block has a hash that maps nodes to their generation and tier.

An entry expires 24 hours after it was last added, so that entries of dead nodes disappear.
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

# KEYS: entries. ARGV: node, its place, lifetime of an entry in seconds.
_ADD = """
for _, entry in ipairs(KEYS) do
  redis.call('HSET', entry, ARGV[1], ARGV[2])
  redis.call('EXPIRE', entry, ARGV[3])
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
        self._greetings = f"baton:{cluster}:kv-holder:"

    async def add(self, holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        await self._run(_ADD, keys, holder.node, f"{holder.generation} {tier:d}", ENTRY_SECONDS)

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
        name = f"{self._greetings}{holder.node}:{holder.generation}"
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
