"""Tests which request of the reservation queue gets free blocks next."""

import asyncio
from collections import Counter

import pytest

from decode_worker.reservation_queue import (
    PATIENCE_SECONDS,
    TOKENS_PER_WAITED_SECOND,
    ReservationQueue,
)


class FakeSlots:
    """A pool that grants a slot to a request if one is free."""

    def __init__(self) -> None:
        self.queue = ReservationQueue()
        self.free_slots = 0
        self.granted: list[str] = []
        self.attempts: Counter[str] = Counter()

    async def get(self, name: str, now_seconds: float, answer_tokens: int) -> str:
        async def ask() -> str | None:
            self.attempts[name] += 1
            await asyncio.sleep(0)
            if not self.free_slots:
                return None
            self.free_slots -= 1
            self.granted.append(name)
            return name

        return await self.queue.reserve(now_seconds, answer_tokens, ask)

    async def add_free_slots(self, count: int) -> None:
        self.free_slots += count
        self.queue.notify_blocks_freed()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_shortest_answer_is_granted_first_and_waiting_counts() -> None:
    pool = FakeSlots()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pool.get("long", 0.0, 1000))
        tasks.create_task(pool.get("short", 0.0, 10))
        tasks.create_task(pool.get("late", 1000 / TOKENS_PER_WAITED_SECOND, 1))
        await settle()
        assert len(pool.queue) == 3
        await pool.add_free_slots(1)
        assert pool.granted == ["short"]
        await pool.add_free_slots(2)
    assert pool.granted == ["short", "long", "late"]
    assert len(pool.queue) == 0


async def test_request_is_not_overtaken_by_a_much_later_one() -> None:
    pool = FakeSlots()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pool.get("endless", 0.0, 10**9))
        tasks.create_task(pool.get("short", PATIENCE_SECONDS + 0.1, 1))
        await settle()
        await pool.add_free_slots(2)
    assert pool.granted == ["endless", "short"]


async def test_only_the_first_retries_and_only_when_there_may_be_space() -> None:
    pool = FakeSlots()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pool.get("first", 0.0, 10))
        tasks.create_task(pool.get("second", 0.0, 20))
        await settle()
        assert pool.attempts == {"first": 1}
        pool.queue.notify_blocks_freed()
        await settle()
        assert pool.attempts == {"first": 2}
        await pool.add_free_slots(2)
    assert pool.granted == ["first", "second"]


async def test_cancelled_request_lets_the_next_one_retry() -> None:
    pool = FakeSlots()
    first = asyncio.create_task(pool.get("first", 0.0, 10))
    second = asyncio.create_task(pool.get("second", 0.0, 20))
    await settle()
    pool.free_slots = 1
    first.cancel()
    assert await second == "second"
    with pytest.raises(asyncio.CancelledError):
        await first
