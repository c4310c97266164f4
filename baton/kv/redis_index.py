"""The index in Redis: a hash per block, node → generation, and a numbered stream per node.

An entry expires a while after it was last added, so that what a dead node left behind goes by
itself. The stream carries (operation, keys) in the order of its own ids.
"""

from collections.abc import Sequence
from typing import Any

from baton.core.ids import BlockKey, Generation, WorkerId
from baton.kv.index import MAX_EVENTS, Holder, PrefixHit, bisect_prefix
from baton.registry.redis_url import bounded, connect

ENTRY_SECONDS = 24 * 3600
BATCH_KEYS = 1024

GENERATION_DIGITS = 20
"""Of 64 bits; what is longer is not ours."""

# KEYS: entries. ARGV: node, generation.
_REMOVE = """
for _, entry in ipairs(KEYS) do
  if redis.call('HGET', entry, ARGV[1]) == ARGV[2] then
    redis.call('HDEL', entry, ARGV[1])
  end
end
"""


class RedisKvIndex:
    def __init__(self, url: str, cluster: str) -> None:
        self._url = url
        self._redis = connect(url)
        self._prefix = f"baton:{cluster}:kv:".encode()
        self._events = f"baton:{cluster}:kv-events:"

    async def add(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), BATCH_KEYS):
            batch = keys[start : start + BATCH_KEYS]
            pipeline = self._redis.pipeline(transaction=False)
            for key in batch:
                pipeline.hset(self._entry(key), holder.node, str(holder.generation))
                pipeline.expire(self._entry(key), ENTRY_SECONDS)
            self._tell(pipeline, holder, "add", batch)
            await self._call(pipeline.execute())

    async def remove(self, holder: Holder, keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), BATCH_KEYS):
            batch = keys[start : start + BATCH_KEYS]
            pipeline = self._redis.pipeline(transaction=False)
            entries = [self._entry(key) for key in batch]
            pipeline.eval(_REMOVE, len(entries), *entries, holder.node, str(holder.generation))
            self._tell(pipeline, holder, "remove", batch)
            await self._call(pipeline.execute())

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        return await bisect_prefix(keys, self._holders_of)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _holders_of(self, key: BlockKey) -> tuple[Holder, ...]:
        raw = await self._call(self._redis.hgetall(self._entry(key)))
        holders = [
            Holder(WorkerId(node.decode("utf-8", "replace")), Generation(int(generation)))
            for node, generation in raw.items()
            if generation.isdigit() and len(generation) <= GENERATION_DIGITS
        ]
        return tuple(sorted(holders, key=lambda holder: holder.node))

    def _entry(self, key: BlockKey) -> bytes:
        return self._prefix + key

    def _tell(self, pipeline: Any, holder: Holder, what: str, keys: Sequence[BlockKey]) -> None:
        event = {
            "operation": what,
            "generation": str(holder.generation),
            "keys": b"".join(keys),
        }
        pipeline.xadd(self._events + holder.node, event, maxlen=MAX_EVENTS, approximate=True)

    async def _call(self, call: Any) -> Any:
        return await bounded(self._url, call)
