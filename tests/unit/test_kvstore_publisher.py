"""What the node tells the index: every change, and everything when the index does not know it."""

import asyncio

from baton.clock import ManualClock
from baton.core.store import BlockFilter, Tier
from baton.kv.index import PrefixHit
from kvstore.index_publisher import RETRY_SECONDS
from tests.store_house import KEYS, House


async def until(house: House, *tiers: Tier) -> None:
    """Until the index says so of the first keys."""
    while True:
        told = [(await house.index.holders(key)).get(house.holder, Tier.NONE) for key in KEYS]
        if tuple(told[: len(tiers)]) == tiers:
            return
        await asyncio.sleep(0)


async def test_changes_are_told_in_order() -> None:
    house = House()
    telling = asyncio.create_task(house.publisher.run())
    await house.put(0, 1, 2, 3)
    await until(house, *[Tier.DRAM] * 4)
    await house.put(4)
    await until(house, Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.NONE, Tier.DRAM)
    assert await house.index.longest_prefix(KEYS[:4]) == PrefixHit(3, (house.holder,))
    await house.node.purge(BlockFilter())
    await until(house, *[Tier.NONE] * 5)
    telling.cancel()


async def test_an_index_that_was_gone_is_told_what_it_missed() -> None:
    house = House()
    assert isinstance(house.clock, ManualClock)
    telling = asyncio.create_task(house.publisher.run())
    await house.put(0, 1)
    await until(house, Tier.DRAM, Tier.DRAM)
    house.index.reachable = False
    await house.node.purge(BlockFilter())
    await house.put(2)
    for _ in range(20):
        await asyncio.sleep(0)
    house.index.reachable = True
    house.clock.advance(RETRY_SECONDS)
    await until(house, Tier.NONE, Tier.NONE, Tier.DRAM)
    telling.cancel()


async def test_an_index_that_was_flushed_is_told_everything() -> None:
    house = House()
    telling = asyncio.create_task(house.publisher.run())
    await house.put(0, 1)
    await until(house, Tier.DRAM, Tier.DRAM)
    house.index.flush()
    await house.put(2)
    await until(house, Tier.DRAM, Tier.DRAM, Tier.DRAM)
    telling.cancel()


async def test_a_log_that_has_forgotten_is_no_loss(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("kvstore.event_log.MAX_CHANGES", 1)
    house = House(room=8)
    for number in range(5):
        await house.put(number)
    telling = asyncio.create_task(house.publisher.run())
    await until(house, *[Tier.DRAM] * 5)
    telling.cancel()
