"""Tests supervised pools whose workers change their role, with fake processes that only record
calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, Unavailable
from orchestrator.cluster_state import ProcessState
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED


class FakeProcess:
    """A process whose state the test sets to "serving"; it exits when it is stopped."""

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        self._ended = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def is_stopping(self) -> bool:
        return self.state.state == "draining"

    @property
    def has_failed_to_start(self) -> bool:
        return False

    async def run(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.state.state = "draining"
        self._ended.set()

    def kill(self) -> None:
        self._ended.set()


class FakePools(SupervisedPools):
    """Pools that record role conversions in ``conversions``. A conversion waits until the event
    ``answers`` is set (a test may clear it), and then raises ``error``, unless that is None."""

    can_convert = True

    def __init__(self) -> None:
        super().__init__()
        self.conversions: list[tuple[str, str]] = []
        self.error: Unavailable | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._number = 0

    def _create_process(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        self._number += 1
        return FakeProcess(ProcessState(f"w{self._number}", role.value, 1, "starting"))

    def _change_role(self, process: SupervisedProcess, role: Role) -> None:
        process.state.role, process.state.state = role.value, "converting"

    async def _convert(self, process: SupervisedProcess) -> None:
        self.conversions.append((process.state.id, process.state.role))
        await self.answers.wait()
        if self.error is not None:
            raise self.error

    def serve(self, *names: str) -> None:
        for supervised in self.processes:
            if not names or supervised.state.id in names:
                supervised.state.state = "serving"

    def describe_workers(self) -> dict[str, str]:
        return {
            supervised.state.id: f"{supervised.state.role} {supervised.state.state}"
            for supervised in self.processes
        }


async def settle() -> None:
    """Let all tasks run until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def open_pools(prefill: int, decode: int) -> AsyncIterator[FakePools]:
    """Open pools with the workers w1, w2, …, the prefill workers first."""
    pools = FakePools()
    async with asyncio.TaskGroup() as tasks:
        pools.open(tasks, lambda supervised: None)
        await pools.scale({PREFILL: prefill, DECODE: decode})
        pools.serve()
        yield pools
        pools.answers.set()
        pools.close()
        await pools.stop()


async def test_newest_serving_workers_are_converted() -> None:
    async with open_pools(4, 1) as pools:
        await pools.scale({PREFILL: 1, DECODE: 3})
        await settle()
        assert pools.conversions == [("w4", "decode"), ("w3", "decode")]
        assert pools.describe_workers() == {
            "w1": "prefill serving",
            "w3": "decode converting",
            "w4": "decode converting",
            "w5": "decode serving",
        }
        assert await pools.sizes() == {PREFILL: 1, DECODE: 3}


async def test_workers_of_two_pools_are_converted_to_mixed_workers_and_back() -> None:
    async with open_pools(2, 2) as pools:
        await pools.scale({PREFILL: 1, DECODE: 1, MIXED: 2})
        await settle()
        assert pools.conversions == [("w2", "mixed"), ("w4", "mixed")]
        pools.serve()
        await pools.scale({MIXED: 0, DECODE: 3})
        await settle()
        assert pools.conversions[2:] == [("w4", "decode"), ("w2", "decode")]
        assert await pools.sizes() == {PREFILL: 1, DECODE: 3, MIXED: 0}


async def test_sizes_that_could_not_serve_requests_are_refused() -> None:
    async with open_pools(1, 1) as pools:
        for wrong in ({DECODE: 0}, {PREFILL: 0, DECODE: 0}, {PREFILL: 0, MIXED: 1}):
            with pytest.raises(Invalid, match="could not serve requests"):
                await pools.scale(wrong)
        with pytest.raises(Invalid, match="w1 is the last prefill worker, without which"):
            await pools.remove(WorkerId("w1"))
        await pools.scale({MIXED: 1})
        pools.serve()
        await pools.remove(WorkerId("w3"))
        assert await pools.sizes() == {PREFILL: 1, DECODE: 1, MIXED: 0}
        await pools.scale({PREFILL: 0, DECODE: 0, MIXED: 1})
        await settle()
        assert pools.conversions == [("w1", "mixed")]


async def test_workers_beyond_the_conversions_are_started() -> None:
    async with open_pools(2, 1) as pools:
        await pools.scale({DECODE: 3, PREFILL: 1})
        assert pools.describe_workers() == {
            "w1": "prefill serving",
            "w2": "decode converting",
            "w3": "decode serving",
            "w4": "decode starting",
        }


async def test_worker_that_does_not_serve_is_replaced_rather_than_converted() -> None:
    async with open_pools(1, 1) as pools:
        await pools.scale({PREFILL: 2})
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.describe_workers() == {
            "w1": "prefill serving", "w2": "decode serving", "w4": "decode starting",
        }  # fmt: skip
        assert pools.conversions == []


async def test_resizing_a_single_pool_converts_no_worker() -> None:
    async with open_pools(2, 1) as pools:
        await pools.scale({PREFILL: 1})
        await pools.scale({DECODE: 2})
        assert pools.conversions == []


async def test_no_worker_is_converted_when_both_pools_grow_or_shrink() -> None:
    async with open_pools(2, 2) as pools:
        await pools.scale({PREFILL: 3, DECODE: 3})
        pools.serve()
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert list(pools.describe_workers()) == ["w1", "w3", "w4"]
        assert pools.conversions == []


async def test_reversed_resize_converts_the_same_worker_back() -> None:
    """The second conversion is sent after the worker has answered the first one."""
    async with open_pools(2, 1) as pools:
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        await pools.scale({PREFILL: 2, DECODE: 1})
        await settle()
        assert pools.conversions == [("w2", "decode")]
        pools.answers.set()
        await settle()
        assert pools.conversions == [("w2", "decode"), ("w2", "prefill")]
        assert pools.describe_workers()["w2"] == "prefill converting"


async def test_worker_that_can_not_be_converted_is_replaced() -> None:
    async with open_pools(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.describe_workers() == {
            "w1": "prefill serving", "w3": "decode serving", "w4": "decode starting",
        }  # fmt: skip


async def test_worker_that_dies_during_conversion_restarts_in_its_new_role() -> None:
    async with open_pools(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 2})
        pools.processes[1].state.state = "restarting"
        pools.answers.set()
        await settle()
        assert pools.describe_workers()["w2"] == "decode restarting"
        assert len(pools.processes) == 3


async def test_worker_removed_during_conversion_is_not_replaced() -> None:
    async with open_pools(2, 2) as pools:
        pools.error = Unavailable("the worker leaves")
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 3})
        await settle()
        await pools.remove(WorkerId("w2"))
        pools.answers.set()
        await settle()
        assert list(pools.describe_workers()) == ["w1", "w3", "w4"]
        assert await pools.sizes() == {PREFILL: 1, DECODE: 2}


async def test_no_worker_is_started_once_the_cluster_stops() -> None:
    async with open_pools(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        await pools.scale({PREFILL: 1, DECODE: 2})
        pools.close()
        await settle()
        assert list(pools.describe_workers()) == ["w1", "w3"]


async def test_without_conversion_support_workers_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakePools, "can_convert", False)
    async with open_pools(2, 1) as pools:
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.conversions == []
        assert list(pools.describe_workers()) == ["w1", "w3", "w4"]
