"""Runs one test suite over the store of responses in Redis and over its in-memory
implementation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.errors import Invalid, Unavailable
from router.responses.redis_response_store import RedisResponseStore
from router.responses.response_store import (
    ENTRY_OVERHEAD_BYTES,
    MAX_RESPONSE_BYTES,
    ResponseLimits,
    ResponseStore,
)
from router.responses.stored_response import (
    MAX_HEADER_BYTES,
    StoredResponse,
    encode_items,
    encode_stored,
)
from testkit.fakes.response_store import MemoryResponseStore

A, B = TenantId("a"), TenantId("b:response:\u00fc%")


def stored(name: str, text: str = "Hi", **fields: Any) -> StoredResponse:
    response = {"id": f"resp_{name}", "status": "completed", "output": [{"text": text}], **fields}
    return StoredResponse(response, encode_items([{"id": f"msg_{name}", "content": "Hello"}]))


SIZE_BYTES = len(encode_stored(stored("1"))) + ENTRY_OVERHEAD_BYTES


class Stores:
    """Makes response stores, either all in Redis or all in memory, and lets time pass for them."""

    def __init__(self, url: str | None, exits: AsyncExitStack) -> None:
        self.url = url
        self.clock = ManualClock()
        self._exits = exits

    def make(self, **limits: Any) -> ResponseStore:
        if self.url is None:
            return MemoryResponseStore(ResponseLimits(**limits), self.clock)
        store = RedisResponseStore(self.url, "test", ResponseLimits(**limits))
        self._exits.push_async_callback(store.close)
        return store

    async def elapse(self, seconds: float) -> None:
        if self.url is None:
            self.clock.advance(seconds)
        else:
            await asyncio.sleep(seconds)


@pytest.fixture(params=["memory", "redis"])
async def stores(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[Stores]:
    async with AsyncExitStack() as exits, Redis.from_url(valkey_url) as client:
        await client.flushdb()
        yield Stores(None if request.param == "memory" else valkey_url, exits)


async def read(store: ResponseStore, tenant: TenantId, response_id: str) -> StoredResponse | None:
    encoded = await store.get(tenant, response_id)
    return encoded.decode() if encoded is not None else None


async def held(store: ResponseStore, tenant: TenantId = A, last: int = 6) -> list[int]:
    """Return each number from 1 to ``last`` for which the store has ``resp_<number>``."""
    return [
        number
        for number in range(1, last + 1)
        if await store.get(tenant, f"resp_{number}") is not None
    ]


async def test_a_response_comes_back_as_it_was_stored(stores: Stores) -> None:
    store = stores.make()
    response = stored("1", "ü\u2028\x00", previous_response_id="resp_0")
    await store.put(A, response)
    assert await read(store, A, "resp_1") == response
    assert await store.size_bytes(A, "resp_1") == len(encode_stored(response))
    assert await store.get(A, "resp_2") is None
    for tenant, missing in ((A, "resp_2"), (B, "resp_1"), (A, "resp:1")):
        assert await store.size_bytes(tenant, missing) == 0


async def test_a_response_is_replaced(stores: Stores) -> None:
    store = stores.make(tenant_bytes=2 * SIZE_BYTES)
    assert not await store.replace(A, stored("1"))
    assert await store.get(A, "resp_1") is None
    await store.put(A, stored("1"))
    await store.put(A, stored("1", "Ha"))
    assert await read(store, A, "resp_1") == stored("1", "Ha")
    assert await store.replace(A, stored("1", "Ho"))
    assert await read(store, A, "resp_1") == stored("1", "Ho")
    await store.put(A, stored("2"))  # the replaced ones don't count any more
    assert await held(store) == [1, 2]


async def test_a_large_response_removes_many_small_ones(stores: Stores) -> None:
    """The limit on a tenant's bytes holds although one run of the Redis script removes at most 500
    responses."""
    store = stores.make(tenant_bytes=1201 * SIZE_BYTES)
    for number in range(1201):
        await store.put(A, stored(str(number)))
    large = stored("1", "Hi" + "x" * (1200 * SIZE_BYTES - 16))  # the header has longer numbers
    await store.put(A, large)
    assert await held(store, last=1200) == [1]
    assert await read(store, A, "resp_1") == large
    await store.put(A, stored("2"))
    assert await held(store) == [2]


async def test_a_response_is_deleted_once(stores: Stores) -> None:
    store = stores.make(tenant_bytes=2 * SIZE_BYTES)
    for _ in range(3):
        await store.put(A, stored("1"))
        assert await store.delete(A, "resp_1")
        assert not await store.delete(A, "resp_1")
        assert await store.get(A, "resp_1") is None
        assert not await store.replace(A, stored("1"))
    await store.put(A, stored("2"))
    await store.put(A, stored("3"))
    assert await held(store) == [2, 3]


async def test_tenants_do_not_see_one_anothers_responses(stores: Stores) -> None:
    store = stores.make()
    await store.put(A, stored("1", "of a"))
    assert await store.get(B, "resp_1") is None
    assert not await store.delete(B, "resp_1")
    assert not await store.replace(B, stored("1"))
    await store.put(B, stored("1", "of b"))
    assert await read(store, A, "resp_1") == stored("1", "of a")
    assert await read(store, B, "resp_1") == stored("1", "of b")


async def test_the_oldest_responses_are_removed_beyond_the_limit_in_bytes(stores: Stores) -> None:
    store = stores.make(tenant_bytes=3 * SIZE_BYTES)
    for number in (1, 2, 3):
        await store.put(A, stored(str(number)))
    await store.put(B, stored("1"))
    await store.put(A, stored("4"))
    assert await held(store) == [2, 3, 4]
    await store.put(A, stored("2"))  # now the newest
    await store.put(A, stored("5", "Hi" + "x" * (SIZE_BYTES // 2)))  # in place of two
    assert await held(store) == [2, 5]
    assert await held(store, B) == [1]


async def test_the_oldest_responses_are_removed_beyond_the_limit_in_number(stores: Stores) -> None:
    store = stores.make(tenant_responses=2)
    for number in (1, 2, 3, 4):
        await store.put(A, stored(str(number)))
        await store.put(B, stored(str(number)))
    assert (await held(store), await held(store, B)) == ([3, 4], [3, 4])


async def test_a_response_larger_than_the_limit_is_refused(stores: Stores) -> None:
    store = stores.make(tenant_bytes=2 * SIZE_BYTES)
    await store.put(A, stored("1"))
    for write in (store.put, store.replace):
        with pytest.raises(Invalid, match="store: false"):
            await write(A, stored("1", "x" * 2 * SIZE_BYTES))
    assert await read(store, A, "resp_1") == stored("1")
    with pytest.raises(Invalid):
        await stores.make().put(A, stored("2", "x" * MAX_RESPONSE_BYTES))


async def test_what_json_can_not_hold_is_refused(stores: Stores) -> None:
    with pytest.raises(Invalid):
        await stores.make().put(A, stored("1", metadata=2**64))


async def test_a_response_expires(stores: Stores) -> None:
    store = stores.make(ttl_seconds=0.4, tenant_bytes=2 * SIZE_BYTES)
    await store.put(A, stored("1"))
    await stores.elapse(0.25)
    await store.put(A, stored("2"))
    assert await held(store) == [1, 2]
    await stores.elapse(0.25)
    assert await held(store) == [2]
    assert not await store.delete(A, "resp_1")
    assert not await store.replace(A, stored("1"))
    await store.put(A, stored("3"))  # the expired one doesn't count any more
    assert await held(store) == [2, 3]


@pytest.mark.parametrize("name", ["", "resp_1\n", "resp_\u00fc", "../order", "x" * 10_000, "*"])
async def test_an_id_may_be_anything(stores: Stores, name: str) -> None:
    store = stores.make()
    assert await store.get(A, name) is None
    assert not await store.delete(A, name)


async def test_the_total_is_taken_from_the_tenant_with_most_bytes(stores: Stores) -> None:
    """A tenant that stores much loses its own responses, whoever stored first."""
    store = stores.make(total_bytes=6 * SIZE_BYTES)
    await store.put(B, stored("1"))
    for number in range(1, 10):
        await store.put(A, stored(str(number)))
    assert (await held(store, A, 9), await held(store, B)) == ([5, 6, 7, 8, 9], [1])
    for number in (2, 3, 4, 5):
        await store.put(B, stored(str(number)))
    assert (await held(store, A, 9), await held(store, B)) == ([7, 8, 9], [3, 4, 5])
    await store.put(B, stored("6", "Hi" + "x" * (2 * SIZE_BYTES - 8)))  # as much as three
    assert (await held(store, A, 9), await held(store, B)) == ([7, 8, 9], [6])
    assert await store.delete(A, "resp_8")
    await store.put(TenantId("c"), stored("1"))
    assert (await held(store, A, 9), await held(store, B)) == ([7, 9], [6])


async def test_a_tenants_first_response_is_stored_however_large_it_is(stores: Stores) -> None:
    store = stores.make(total_bytes=4 * SIZE_BYTES)
    for tenant in (A, B):
        for number in (1, 2):
            await store.put(tenant, stored(str(number)))
    await store.put(TenantId("c"), stored("1", "Hi" + "x" * (2 * SIZE_BYTES - 8)))
    assert await held(store, TenantId("c")) == [1]
    assert sorted([await held(store, A), await held(store, B)]) == [[], [2]]
    with pytest.raises(Invalid, match="store: false"):
        await store.put(TenantId("d"), stored("1", "x" * 4 * SIZE_BYTES))


async def test_expired_responses_of_all_tenants_leave_the_total(stores: Stores) -> None:
    store = stores.make(ttl_seconds=0.4, total_bytes=3 * SIZE_BYTES)
    for number in (1, 2):
        await store.put(A, stored(str(number)))
    await stores.elapse(0.25)
    await store.put(B, stored("1"))
    await stores.elapse(0.25)
    await store.put(B, stored("2"))
    await store.put(B, stored("3"))
    assert (await held(store, A), await held(store, B)) == ([], [1, 2, 3])


HEADER, _, REST = encode_stored(stored("1")).partition(b"\n")


def with_header(**fields: Any) -> bytes:
    return orjson.dumps({**orjson.loads(HEADER), **fields}) + b"\n" + REST


DAMAGES = [
    b"", b"{", b"\xff", b"[]\n" + REST, HEADER, REST, HEADER + REST,
    b" " * MAX_HEADER_BYTES + HEADER + b"\n" + REST,
    encode_stored(stored("1"))[:-1], encode_stored(stored("1")) + b" ",
    with_header(id="resp_2"), with_header(status=1), with_header(background=None),
    with_header(sizes=None), with_header(sizes=[len(REST)]), with_header(sizes=[1, len(REST), -1]),
    with_header(sizes=[0, len(REST), 0]), with_header(sizes=["a", 1, 1]),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
async def test_a_damaged_response_counts_as_missing(valkey_url: str, damage: bytes) -> None:
    store = RedisResponseStore(valkey_url, "damaged", ResponseLimits())
    await store.put(A, stored("1"))
    async with Redis.from_url(valkey_url) as client:
        await client.set("baton:damaged:responses:a:response:resp_1", damage)
    with capture_logs() as logs:
        assert await store.get(A, "resp_1") is None
    assert [line["event"] for line in logs] == ["damaged_response"]
    await store.close()


async def test_responses_expire_and_their_indexes_are_removed(valkey_url: str) -> None:
    """Redis may evict only keys that expire. The indexes, without which the limits would not hold,
    are removed when a response of any tenant is stored."""
    store = RedisResponseStore(valkey_url, "keys", ResponseLimits(ttl_seconds=0.2))
    async with Redis.from_url(valkey_url) as client:
        await store.put(A, stored("1"))
        await store.put(B, stored("1"))
        prefix = "baton:keys:responses:"
        keys = {
            key.decode().removeprefix(prefix): await client.pttl(key)
            async for key in client.scan_iter(f"{prefix}*")
        }
        quoted = "b%3Aresponse%3A%C3%BC%25"
        assert {key for key, ttl in keys.items() if 0 < ttl <= 200} == {
            "a:response:resp_1", f"{quoted}:response:resp_1"
        }  # fmt: skip
        assert {key for key, ttl in keys.items() if ttl == -1} == {
            "tenants", "oldest", "a:order", "a:sizes", f"{quoted}:order", f"{quoted}:sizes"
        }  # fmt: skip
        while await client.exists(f"{prefix}{quoted}:response:resp_1"):
            await asyncio.sleep(0.05)
        await store.put(A, stored("2"))
        assert await store.delete(A, "resp_2")
        assert [key async for key in client.scan_iter(f"{prefix}*")] == []
    await store.close()


@pytest.mark.parametrize("lost", ["tenants", "oldest", "a:order", "a:sizes", "a:response:resp_1"])
async def test_redis_may_lose_any_key(valkey_url: str, lost: str) -> None:
    cluster = lost.rpartition(":")[2]
    limits = ResponseLimits(tenant_bytes=2 * SIZE_BYTES, total_bytes=3 * SIZE_BYTES)
    store = RedisResponseStore(valkey_url, cluster, limits)
    async with Redis.from_url(valkey_url) as client:
        await store.put(A, stored("1"))
        await store.put(A, stored("2"))
        assert await client.delete(f"baton:{cluster}:responses:{lost}") == 1
    for number in (3, 4, 5, 6):
        await store.put(A, stored(str(number)))
        assert (await held(store, last=number))[-2:] == [number - 1, number]
    assert (await held(store))[-2:] == [5, 6]
    assert await store.delete(A, "resp_6")
    await store.close()


async def test_a_redis_that_is_gone_is_unavailable() -> None:
    store = RedisResponseStore("redis://127.0.0.1:1/0", "test", ResponseLimits())
    for call in (store.put, store.replace):
        with pytest.raises(Unavailable):
            await call(A, stored("1"))
    for look_up in (store.get, store.delete):
        with pytest.raises(Unavailable):
            await look_up(A, "resp_1")
    await store.close()
