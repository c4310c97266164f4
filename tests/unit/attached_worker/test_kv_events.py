"""Tests that a worker knows what its server has cached, from the server's KV events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from attached_worker.cached_blocks import CachedBlocks
from attached_worker.http_exchange import parse_address
from attached_worker.vllm_event_source import EventSource, find_events
from attached_worker.vllm_event_stream import EventStream
from attached_worker.vllm_kv_events import KvEventReader
from attached_worker.vllm_server import VllmServer
from baton.clock import SystemClock
from baton.config.attached_server import event_endpoints
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import BlockKey, Incarnation
from baton.core.server_api import hashed_salt
from baton.core.store import Tier
from baton.errors import Corrupt, Invalid
from testkit.fakes.kv_events import FakeKvEvents
from testkit.fakes.vllm_server import FakeVllm

ROOT = KeyRoot(b"digest", "auto", 16)
PROMPT = list(range(100, 150))  # three blocks, and two tokens
SALT = b"secret"
ENDPOINTS = '{"endpoint": "ipc:///a", "replay_endpoint": "ipc:///b"}'


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attached_worker.vllm_event_stream.CHECK_SECONDS", 0.05)


def expected(tokens: list[int], salt: bytes = b"") -> list[BlockKey]:
    return block_keys(KeyRoot(b"digest", "auto", 16, tenant_salt=salt).key(), tokens, 16)


class Watched:
    """What a watcher of the worker knows."""

    def __init__(self, num_blocks: int = 200) -> None:
        self.cached = CachedBlocks(ROOT, Incarnation(1), num_blocks)
        self.keys: set[BlockKey] = set()

    async def update(self) -> set[BlockKey]:
        """Read a snapshot and return the keys."""
        pages = self.cached.watch(Incarnation(0), 0)
        self.keys = set()
        async for page in pages:
            if page.tier is Tier.DRAM:
                self.keys |= set(page.keys)
            if not page.has_more:
                break
        await pages.aclose()
        return self.keys

    async def until(self, *chains: list[BlockKey]) -> None:
        wanted = {key for chain in chains for key in chain}
        await until(lambda: self.cached.is_complete and len(self.cached) == len(wanted))
        assert await self.update() == wanted


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def followed(server: FakeKvEvents, watched: Watched) -> AsyncIterator["asyncio.Task[None]"]:
    """Follow the events of a server that is open."""
    reader = KvEventReader(watched.cached, 16)
    source = EventSource(server.events, server.replay)
    stream = EventStream(source, SystemClock(), watched.cached, reader.apply)
    running = asyncio.create_task(stream.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def opened(server: FakeKvEvents) -> AsyncIterator[FakeKvEvents]:
    server.open()
    try:
        yield server
    finally:
        await server.close()


@pytest.mark.parametrize("as_arrays", [False, True])
async def test_keys_are_those_of_the_router(tmp_path: Path, as_arrays: bool) -> None:
    watched = Watched()
    watched.cached.learn_salt(hashed_salt(SALT), SALT)
    async with opened(FakeKvEvents(tmp_path, as_arrays=as_arrays)) as server:
        await server.use(PROMPT)
        async with followed(server, watched):
            await watched.until(expected(PROMPT))  # by the replay
            await server.use(PROMPT, hashed_salt(SALT))
            longer = [*PROMPT, *range(40)]
            await server.use(longer)
            await watched.until(expected(longer), expected(PROMPT, SALT))
            await server.clear()
            await watched.until([])


async def test_evicted_blocks_are_removed(tmp_path: Path) -> None:
    watched, other = Watched(4), list(range(500, 532))
    async with opened(FakeKvEvents(tmp_path, num_blocks=4)) as server:
        async with followed(server, watched):
            await server.use(PROMPT)
            await server.use(other)
            await watched.until(expected(PROMPT)[:2], expected(other))


async def test_events_that_were_lost_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, other = Watched(), list(range(500, 532))
    monkeypatch.setattr("attached_worker.vllm_event_stream.CHECK_SECONDS", 1e6)
    async with opened(FakeKvEvents(tmp_path)) as server, followed(server, watched):
        await server.subscribed()
        await server.use([1] * 16)
        await watched.until(expected([1] * 16))
        server.lose = True
        await server.use(PROMPT)
        server.lose = False
        await server.use(other)
        await watched.until(expected([1] * 16), expected(PROMPT), expected(other))


async def test_a_restarted_server_has_nothing_cached(tmp_path: Path) -> None:
    watched, longer, other = Watched(), [*PROMPT, *range(40)], list(range(500, 532))
    first = FakeKvEvents(tmp_path)
    first.open()
    await first.use(PROMPT)
    await first.use(longer)
    async with followed(first, watched):
        await watched.until(expected(longer))
        await first.close()
        async with opened(FakeKvEvents(tmp_path)) as second:
            await second.use(other)
            await watched.until(expected(other))


async def test_nothing_is_reported_if_the_first_events_are_gone(tmp_path: Path) -> None:
    watched = Watched()
    async with opened(FakeKvEvents(tmp_path, buffer_steps=1)) as server:
        await server.use([1] * 16)
        await server.use(PROMPT)
        async with followed(server, watched):
            await until(lambda: len(watched.cached) == 3)
            assert not watched.cached.is_complete
            await server.clear()
            await watched.until([])


async def test_an_event_that_can_not_be_read_ends_the_stream(tmp_path: Path) -> None:
    watched = Watched()
    async with opened(FakeKvEvents(tmp_path)) as server:
        await server.use(PROMPT)
        async with followed(server, watched) as running:
            await watched.until(expected(PROMPT))
            await server.publish([{"type": "BlockStored", "block_hashes": 7}])
            with pytest.raises(Corrupt, match="can't be read"):
                await running
    assert (watched.cached.is_complete, len(watched.cached)) == (False, 0)


def stored(**fields: Any) -> bytes:
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
        "token_ids": PROMPT[:16], "block_size": 16, "medium": "GPU", "lora_id": None,
        "group_idx": 0,
    }  # fmt: skip
    return bytes(msgpack.packb([0.0, [event | fields], 0]))


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter"]]},
        {"lora_name": "adapter", "extra_keys": [["adapter", "salt"]]},
        {"extra_keys": [[["image", 0]]]},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_size": 8, "token_ids": PROMPT[:8]},
        {"parent_block_hash": 99},
        {"parent_block_hash": 99, "extra_keys": [["salt"]]},
        {"type": "BlockMoved"},
    ],
)
def test_blocks_without_a_key_of_ours_are_left_out(fields: dict[str, Any]) -> None:
    cached = CachedBlocks(ROOT, Incarnation(1), 10)
    KvEventReader(cached, 16).apply(stored(**fields))
    assert len(cached) == 0


def test_only_the_first_group_with_full_attention_counts() -> None:
    cached = CachedBlocks(ROOT, Incarnation(1), 10)
    reader = KvEventReader(cached, 16)
    for group, kind in ((0, "sliding_window"), (1, "full_attention"), (2, "full_attention")):
        reader.apply(stored(group_idx=group, kv_cache_spec_kind=kind))
    assert len(cached) == 1
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    reader.apply(msgpack.packb([0.0, [removed | {"group_idx": 0}, removed | {"group_idx": 2}]]))
    assert len(cached) == 1
    reader.apply(msgpack.packb([0.0, [removed | {"group_idx": 1}]]))
    assert len(cached) == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", msgpack.packb(7), msgpack.packb([0.0, [7]]), msgpack.packb([0.0, [{}]]),
        stored(token_ids=[1]), stored(token_ids=[-1] * 16), stored(token_ids="x" * 16),
        stored(block_hashes=[[1]]), stored(block_hashes=None),
    ],
)  # fmt: skip
def test_malformed_events(payload: bytes) -> None:
    with pytest.raises(Corrupt):
        KvEventReader(CachedBlocks(ROOT, Incarnation(1), 10), 16).apply(payload)


async def test_chains_with_an_unknown_salt_count_once_it_is_known() -> None:
    watched = Watched()
    watched.cached.store([1, 2], None, PROMPT[:32], hashed_salt(SALT))
    watched.cached.store([3], 2, PROMPT[32:48], "")
    watched.cached.store([4], None, PROMPT[:16], hashed_salt(b"other"))
    assert await watched.update() == set()
    watched.cached.learn_salt(hashed_salt(SALT), SALT)
    assert await watched.update() == set(expected(PROMPT, SALT))
    watched.cached.remove([3, 4, 99])
    assert await watched.update() == set(expected(PROMPT[:32], SALT))


async def test_a_block_is_cached_while_the_server_has_a_copy() -> None:
    watched = Watched()
    for _ in range(2):
        watched.cached.store([1], None, PROMPT[:16], "")
    watched.cached.remove([1])
    assert await watched.update() == set(expected(PROMPT[:16]))
    watched.cached.remove([1])
    assert await watched.update() == set()


def test_a_server_can_not_report_more_blocks_than_it_has() -> None:
    cached = CachedBlocks(ROOT, Incarnation(1), 2)
    with pytest.raises(Corrupt, match="more than its 2 blocks"):
        cached.store([1, 2, 3], None, PROMPT[:48], "")


async def test_the_server_says_where_its_events_are(tmp_path: Path) -> None:
    fake, cached = FakeVllm(), CachedBlocks(ROOT, Incarnation(1), 200)
    await fake.start()
    server = VllmServer(parse_address(fake.url))
    await server.follow_cache(cached, SystemClock())  # ends: it has none
    await fake.close()
    fake = FakeVllm()
    fake.events = FakeKvEvents(tmp_path)
    await fake.start()
    server = VllmServer(parse_address(fake.url))
    running = asyncio.create_task(server.follow_cache(cached, SystemClock()))
    await fake.events.use(PROMPT)
    await until(lambda: cached.is_complete and len(cached) == 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await fake.close()


@pytest.mark.parametrize(
    "answer",
    [
        "{}", "[]", "7", "no JSON", '{"0": {}}',
        '{"0": {"endpoint": "ipc:///a", "replay_endpoint": null}}',
        f'{{"0": {ENDPOINTS}, "1": {ENDPOINTS}}}',
    ],
)  # fmt: skip
async def test_events_that_can_not_be_used(answer: str) -> None:
    fake = FakeVllm()
    fake._documents = lambda: {"/kv_event_sources": answer}  # type: ignore[method-assign]
    await fake.start()
    assert await find_events(parse_address(fake.url)) is None
    await fake.close()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("events=ipc:///a", "unknown parameter 'events'; known are kv_events and kv_replay"),
        ("kv_events=ipc:///a", "also needs the parameter kv_replay"),
        ("kv_events=ipc:///a&kv_replay=", "kv_replay is ''; it must be an endpoint"),
        ("kv_events=tcp://*:1&kv_replay=ipc:///a", "kv_events is 'tcp://*:1'"),
        ("kv_events=a&kv_replay=ipc:///a", "as ipc:///PATH or tcp://HOST:PORT"),
    ],
)
def test_wrong_endpoints(query: str, problem: str) -> None:
    with pytest.raises(Invalid, match=problem.replace("*", r"\*")):
        event_endpoints(f"http://host:1?{query}")


def test_endpoints_in_the_url() -> None:
    url = "http://host:1/v1?kv_events=ipc:///a/b&kv_replay=tcp://host:2"
    assert event_endpoints(url) == ("ipc:///a/b", "tcp://host:2")
    assert event_endpoints("http://host:1") is None
    assert parse_address(url).url == "http://host:1"
