"""Tests in which iteration of the event loop each request gets its turn."""

import asyncio

import pytest

from baton.core.ids import TenantId
from router.serving.offload_executor import MIN_OFFLOAD_BYTES, OffloadExecutor
from router.tenants.fair_turns import MIN_TURN_BYTES, FairTurns

A, B = TenantId("a"), TenantId("b")
SIZE = 4 * MIN_TURN_BYTES


class Turns:
    """Requests that note in which iteration of the event loop they get their turns."""

    def __init__(self, bytes_per_iteration: int) -> None:
        self.turns = FairTurns(bytes_per_iteration)
        self.order: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def request(
        self, name: str, model: str, tenant: TenantId = A, size: int = SIZE
    ) -> asyncio.Task[None]:
        async def run() -> None:
            await self.turns.wait(model, tenant, size)
            self.order.append(name)

        self._tasks.append(asyncio.create_task(run()))
        return self._tasks[-1]

    async def by_iteration(self) -> list[list[str]]:
        """Return the requests that got their turns in each iteration, once all have ended."""
        iterations: list[list[str]] = []
        while self.order or not all(task.done() for task in self._tasks):
            iterations.append(self.order.copy())
            self.order.clear()
            await asyncio.sleep(0)
        assert self.turns.num_waiting == 0
        return [each for each in iterations if each]


async def test_lone_request_does_not_wait() -> None:
    turns = FairTurns()
    for _ in range(3):
        coroutine = turns.wait("m", A, 100)
        with pytest.raises(StopIteration):
            coroutine.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert turns.num_waiting == 0


async def test_burst_is_spread_over_iterations() -> None:
    scene = Turns(2 * SIZE)
    for number in range(5):
        scene.request(str(number), "m")
    assert await scene.by_iteration() == [["0", "1"], ["2", "3"], ["4"]]


async def test_request_for_another_model_waits_for_two_requests_at_most() -> None:
    scene = Turns(SIZE)
    for number in range(100):
        scene.request(f"busy {number}", "busy")
    await asyncio.sleep(0)
    scene.request("calm", "calm")
    served = [name for each in await scene.by_iteration() for name in each]
    assert served[:4] == ["busy 0", "busy 1", "busy 2", "calm"]


async def test_tenants_of_a_model_take_turns() -> None:
    scene = Turns(SIZE)
    for number in range(3):
        scene.request(f"a{number}", "m", A)
    for number in range(2):
        scene.request(f"b{number}", "m", B)
    scene.request("other", "n", A)
    assert [name for each in await scene.by_iteration() for name in each] == [
        "a0", "a1", "other", "b0", "a2", "b1",
    ]  # fmt: skip


async def test_small_requests_share_an_iteration() -> None:
    scene = Turns(2 * MIN_TURN_BYTES)
    for number in range(4):
        scene.request(str(number), "m", size=number)
    assert await scene.by_iteration() == [["0", "1"], ["2", "3"]]


async def test_request_longer_than_an_iteration_gets_one_of_its_own() -> None:
    scene = Turns(SIZE)
    for number in range(3):
        scene.request(str(number), "m", size=5 * SIZE)
    assert await scene.by_iteration() == [["0"], ["1"], ["2"]]


async def test_cancelled_request_takes_no_turn() -> None:
    scene = Turns(SIZE)
    tasks = [scene.request(str(number), "m") for number in range(4)]
    await asyncio.sleep(0)
    assert scene.turns.num_waiting == 3
    tasks[1].cancel()
    tasks[2].cancel()
    assert await scene.by_iteration() == [["0"], ["3"]]
    assert [task.cancelled() for task in tasks] == [False, True, True, False]


async def test_only_small_prompts_take_turns() -> None:
    executor = OffloadExecutor()
    small = [
        asyncio.create_task(executor.tokenize("m", A, MIN_OFFLOAD_BYTES, lambda: "small"))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    assert executor.num_waiting == 1
    large = asyncio.create_task(executor.tokenize("m", A, MIN_OFFLOAD_BYTES + 1, lambda: "large"))
    assert await asyncio.gather(*small, large) == ["small", "small", "large"]
    assert executor.num_waiting == 0
