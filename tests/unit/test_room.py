"""Who asks for room next."""

import asyncio
from collections import Counter

import pytest

from baton.worker.reservation_queue import (
    PATIENCE_SECONDS,
    TOKENS_PER_WAITED_SECOND,
    ReservationQueue,
)


class House:
    """Rooms that are given to whoever asks while there are some."""

    def __init__(self) -> None:
        self.queue = ReservationQueue()
        self.rooms = 0
        self.given: list[str] = []
        self.asked: Counter[str] = Counter()

    async def get(self, name: str, now_seconds: float, answer_tokens: int) -> str:
        async def ask() -> str | None:
            self.asked[name] += 1
            await asyncio.sleep(0)
            if not self.rooms:
                return None
            self.rooms -= 1
            self.given.append(name)
            return name

        return await self.queue.get(now_seconds, answer_tokens, ask)

    async def add_rooms(self, count: int) -> None:
        self.rooms += count
        self.queue.notice()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_shortest_answer_first_then_by_waiting() -> None:
    house = House()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(house.get("long", 0.0, 1000))
        tasks.create_task(house.get("short", 0.0, 10))
        tasks.create_task(house.get("late", 1000 / TOKENS_PER_WAITED_SECOND, 1))
        await settle()
        assert len(house.queue) == 3
        await house.add_rooms(1)
        assert house.given == ["short"]
        await house.add_rooms(2)
    assert house.given == ["short", "long", "late"]
    assert len(house.queue) == 0


async def test_nobody_is_passed_by_who_asks_much_later() -> None:
    house = House()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(house.get("endless", 0.0, 10**9))
        tasks.create_task(house.get("short", PATIENCE_SECONDS + 0.1, 1))
        await settle()
        await house.add_rooms(2)
    assert house.given == ["endless", "short"]


async def test_only_the_first_asks_and_only_when_there_may_be_room() -> None:
    house = House()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(house.get("first", 0.0, 10))
        tasks.create_task(house.get("second", 0.0, 20))
        await settle()
        assert house.asked == {"first": 1}
        house.queue.notice()
        await settle()
        assert house.asked == {"first": 2}
        await house.add_rooms(2)
    assert house.given == ["first", "second"]


async def test_who_leaves_lets_the_next_one_ask() -> None:
    house = House()
    first = asyncio.create_task(house.get("first", 0.0, 10))
    second = asyncio.create_task(house.get("second", 0.0, 20))
    await settle()
    house.rooms = 1
    first.cancel()
    assert await second == "second"
    with pytest.raises(asyncio.CancelledError):
        await first
