"""Tests that the node's publisher sends every change to the index, and all blocks if the index does
not know the node."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey
from baton.core.store import BlockFilter, Tier
from baton.errors import Unavailable
from baton.kv.index import KvHolder, PrefixHit
from kvstore import index_publisher
from kvstore.index_publisher import RETRY_SECONDS
from tests.store_harness import KEYS, StoreHarness


async def wait_for_tiers(store: StoreHarness, *tiers: Tier) -> None:
    """Wait until the index reports ``tiers`` for the first keys of KEYS."""
    while True:
        reported = [(await store.index.holders(key)).get(store.holder, Tier.NONE) for key in KEYS]
        if tuple(reported[: len(tiers)]) == tiers:
            return
        await asyncio.sleep(0)


async def test_changes_are_published_in_order() -> None:
    store = StoreHarness()
    publishing = asyncio.create_task(store.publisher.run())
    await store.put(0, 1, 2, 3)
    await wait_for_tiers(store, *[Tier.DRAM] * 4)
    await store.put(4)
    await wait_for_tiers(store, Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.NONE, Tier.DRAM)
    assert await store.index.longest_prefix(KEYS[:4]) == PrefixHit(3, (store.holder,))
    await store.node.purge(BlockFilter())
    await wait_for_tiers(store, *[Tier.NONE] * 5)
    publishing.cancel()


async def test_index_that_was_unreachable_gets_missed_changes() -> None:
    store = StoreHarness()
    assert isinstance(store.clock, ManualClock)
    publishing = asyncio.create_task(store.publisher.run())
    await store.put(0, 1)
    await wait_for_tiers(store, Tier.DRAM, Tier.DRAM)
    store.index.is_reachable = False
    await store.node.purge(BlockFilter())
    await store.put(2)
    await run_tasks()
    store.index.is_reachable = True
    store.clock.advance(RETRY_SECONDS)
    await wait_for_tiers(store, Tier.NONE, Tier.NONE, Tier.DRAM)
    publishing.cancel()


async def test_flushed_index_gets_all_blocks() -> None:
    store = StoreHarness()
    publishing = asyncio.create_task(store.publisher.run())
    await store.put(0, 1)
    await wait_for_tiers(store, Tier.DRAM, Tier.DRAM)
    store.index.flush()
    await store.put(2)
    await wait_for_tiers(store, Tier.DRAM, Tier.DRAM, Tier.DRAM)
    publishing.cancel()


async def test_truncated_event_log_loses_nothing(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("baton.kv.event_log.MAX_CHANGES", 1)
    store = StoreHarness(dram_blocks=8)
    for number in range(5):
        await store.put(number)
    publishing = asyncio.create_task(store.publisher.run())
    await wait_for_tiers(store, *[Tier.DRAM] * 5)
    publishing.cancel()


async def test_missed_changes_are_merged_up_to_a_number_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_publisher, "MAX_MERGED_KEYS", 4)
    store = StoreHarness()
    assert isinstance(store.clock, ManualClock)
    calls: list[tuple[Tier, int]] = []
    publishing = asyncio.create_task(store.publisher.run())
    await run_tasks()

    async def add(holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        calls.append((tier, len(keys)))
        if len(calls) == 3:
            raise Unavailable("the index can't be reached")

    async def remove(holder: KvHolder, keys: Sequence[BlockKey]) -> None:
        calls.append((Tier.NONE, len(keys)))

    monkeypatch.setattr(store.index, "add", add)
    monkeypatch.setattr(store.index, "remove", remove)
    for tier, num_keys in [
        (Tier.DRAM, 3), (Tier.DRAM, 1), (Tier.DRAM, 6), (Tier.DRAM, 2), (Tier.DRAM, 2),
        (Tier.DRAM, 1), (Tier.NONE, 1), (Tier.NONE, 1), (Tier.DISK, 1),
    ]:  # fmt: skip
        store.node.events.append(tier, KEYS[:num_keys])
    await run_tasks()
    assert calls == [(Tier.DRAM, 4), (Tier.DRAM, 6), (Tier.DRAM, 4)]
    store.clock.advance(RETRY_SECONDS)
    await run_tasks()
    assert calls[3:] == [(Tier.DRAM, 4), (Tier.DRAM, 1), (Tier.NONE, 2), (Tier.DISK, 1)]
    publishing.cancel()


async def run_tasks() -> None:
    """Run the other tasks until they wait for the clock or for a change."""
    for _ in range(20):
        await asyncio.sleep(0)
