"""Runs one test suite over the KV index in Redis and over its in-memory implementation."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier
from baton.errors import Unavailable
from baton.kv.index import KvHolder, KvIndex, PrefixHit, bisect_prefix
from baton.kv.redis_index import BATCH_KEYS, ENTRY_SECONDS, RedisKvIndex
from testkit.fakes.kv_index import MemoryKvIndex
from tests.redis_servers import RunningValkey


def holder(node: str, generation: int = 1) -> KvHolder:
    return KvHolder(WorkerId(node), Incarnation(generation))


def chain(count: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in range(first, first + count)]


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[KvIndex]:
    if request.param == "memory":
        yield MemoryKvIndex()
        return
    async with Redis.from_url(valkey_url) as client:
        await client.flushall()
    opened = RedisKvIndex(valkey_url, "test")
    yield opened
    await opened.close()


async def test_the_longest_prefix_is_found_at_every_length(index: KvIndex) -> None:
    keys = chain(9)
    assert await index.longest_prefix([]) == PrefixHit(0, ())
    for held in range(len(keys)):
        assert (await index.longest_prefix(keys)).num_blocks == held
        await index.add(holder("a"), keys[held : held + 1], Tier.DRAM)
    assert await index.longest_prefix(keys) == PrefixHit(9, (holder("a"),))
    assert await index.longest_prefix(keys + chain(3, 100)) == PrefixHit(9, (holder("a"),))
    assert (await index.longest_prefix(chain(5, 200))).num_blocks == 0


async def test_the_holders_of_a_prefix_are_those_of_its_last_block(index: KvIndex) -> None:
    keys = chain(4)
    await index.register_holder(holder("b"))
    await index.add(holder("b"), keys, Tier.DRAM)
    await index.add(holder("a"), keys[:2], Tier.DRAM)
    assert await index.longest_prefix(keys) == PrefixHit(4, (holder("b"),))
    both = PrefixHit(2, (holder("a"), holder("b")))
    assert await index.longest_prefix(keys[:2]) == both


async def test_a_restarted_node_replaces_its_entries(index: KvIndex) -> None:
    keys = chain(2)
    await index.add(holder("a", 1), keys, Tier.DRAM)
    await index.add(holder("a", 2), keys[:1], Tier.DRAM)
    assert await index.longest_prefix(keys[:1]) == PrefixHit(1, (holder("a", 2),))
    await index.remove(holder("a", 1), keys)  # a late message from the old incarnation
    assert await index.longest_prefix(keys[:1]) == PrefixHit(1, (holder("a", 2),))
    await index.remove(holder("a", 2), keys[:1])
    assert await index.longest_prefix(keys) == PrefixHit(0, ())


async def test_more_keys_than_one_batch_are_added_and_removed(index: KvIndex) -> None:
    keys = chain(2 * BATCH_KEYS + 1)
    await index.add(holder("a"), keys, Tier.DRAM)
    assert (await index.longest_prefix(keys)).num_blocks == len(keys)
    await index.remove(holder("a"), keys[BATCH_KEYS - 1 :])
    assert (await index.longest_prefix(keys)).num_blocks == BATCH_KEYS - 1


async def test_prefixes_are_searched_not_scanned() -> None:
    queried = []

    async def holders_of(key: BlockKey) -> dict[KvHolder, Tier]:
        queried.append(key)
        return {holder("a"): Tier.DRAM} if key < chain(1, 700)[0] else {}

    assert (await bisect_prefix(chain(1024), holders_of)).num_blocks == 700
    assert len(queried) <= 11


async def test_holders_are_returned_with_their_tiers(index: KvIndex) -> None:
    keys = chain(2)
    await index.register_holder(holder("a"))
    await index.register_holder(holder("b"))
    await index.add(holder("a"), keys, Tier.DRAM)
    await index.add(holder("b"), keys[:1], Tier.DISK)
    await index.add(holder("a"), keys[:1], Tier.DISK)
    assert await index.holders(keys[0]) == {holder("a"): Tier.DISK, holder("b"): Tier.DISK}
    assert await index.holders(keys[1]) == {holder("a"): Tier.DRAM}
    assert await index.holders(chain(1, 9)[0]) == {}


async def test_entries_expire(valkey_url: str) -> None:
    index = RedisKvIndex(valkey_url, "bounded")
    key = chain(1)
    await index.add(holder("a"), key, Tier.DRAM)
    with redis.Redis.from_url(valkey_url) as client:
        assert 0 < client.ttl(b"baton:bounded:kv:" + key[0]) <= ENTRY_SECONDS
        await index.remove(holder("a"), key)
        assert not client.exists(b"baton:bounded:kv:" + key[0])
    await index.close()


async def test_nodes_that_have_left_are_removed_from_entries(valkey_url: str) -> None:
    index = RedisKvIndex(valkey_url, "left")
    keys = chain(2)
    present, left, earlier = holder("present"), holder("left"), holder("restarted", 1)
    for each in (present, left, earlier):
        await index.register_holder(each)
        await index.add(each, keys, Tier.DISK)
    await index.add(holder("a"), keys[:1], Tier.DRAM)
    assert set(await index.holders(keys[0])) == {holder("a"), present, left, earlier}
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(b"baton:left:kv:" + keys[0], b"malformed", b"not a place")
        client.delete("baton:left:kv-holder:left:1", "baton:left:kv-holder:restarted:1")
    await index.register_holder(holder("restarted", 2))
    for _ in range(100):  # each call checks four of five fields
        await index.add(holder("a"), keys[:1], Tier.DRAM)
    with redis.Redis.from_url(valkey_url) as client:
        assert sorted(client.hkeys(b"baton:left:kv:" + keys[0])) == [b"a", b"present"]
    assert set(await index.holders(keys[1])) == {present, left, earlier}
    await index.add(present, keys[1:], Tier.DRAM)
    assert await index.holders(keys[1]) == {present: Tier.DRAM}
    await index.close()


async def test_greet_tells_whether_the_incarnation_is_known(index: KvIndex) -> None:
    assert [await index.register_holder(holder("a")) for _ in range(2)] == [False, True]
    assert not await index.register_holder(holder("a", 2))


async def test_removing_missing_entries_changes_nothing(index: KvIndex) -> None:
    keys = chain(3)
    await index.add(holder("a"), [], Tier.DRAM)
    await index.remove(holder("a"), [])
    await index.remove(holder("a"), keys)
    await index.add(holder("b"), keys, Tier.DRAM)
    await index.remove(holder("a"), keys)
    assert await index.longest_prefix(keys) == PrefixHit(3, (holder("b"),))


async def test_clusters_are_isolated(valkey_url: str) -> None:
    one, other = RedisKvIndex(valkey_url, "one"), RedisKvIndex(valkey_url, "other")
    await one.add(holder("a"), chain(1), Tier.DRAM)
    assert await other.longest_prefix(chain(1)) == PrefixHit(0, ())
    await one.close()
    await other.close()


async def test_malformed_entries_in_redis_are_ignored(valkey_url: str) -> None:
    index = RedisKvIndex(valkey_url, "garbage")
    key = chain(1)[0]
    entry = b"baton:garbage:kv:" + key
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(entry, b"\xff", b"not a number")
        client.hset(entry, b"long", b"9" * 5000 + b" 1")
        client.hset(entry, b"negative", b"-1 1")
        client.hset(entry, b"tier", b"3 7")
        client.hset(entry, b"a", b"3 1")
        client.set(b"baton:garbage:kv:" + chain(1, 5)[0], b"a text")
    assert await index.longest_prefix(chain(1, 5)) == PrefixHit(0, ())
    assert await index.longest_prefix([key]) == PrefixHit(1, (holder("a", 3),))
    await index.close()


async def test_an_unreachable_redis_is_unavailable(tmp_path: Path) -> None:
    server = RunningValkey(tmp_path)
    index = RedisKvIndex(server.url, "test")
    with server:
        await index.add(holder("a"), chain(1), Tier.DRAM)
    for call in (
        index.add(holder("a"), chain(1), Tier.DRAM),
        index.remove(holder("a"), chain(1)),
        index.longest_prefix(chain(1)),
    ):
        with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:\d+ failed"):
            await call
    await index.close()


async def test_the_in_memory_index_can_be_made_unreachable() -> None:
    index = MemoryKvIndex()
    index.is_reachable = False
    for call in (index.add(holder("a"), chain(1), Tier.DRAM), index.longest_prefix(chain(1))):
        with pytest.raises(Unavailable):
            await call
