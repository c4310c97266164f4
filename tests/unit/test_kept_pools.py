"""Pools whose workers change their role, with keepers that only remember."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Unavailable
from orchestrator.cluster_state import ProcessState
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess

PREFILL, DECODE = Role.PREFILL, Role.DECODE


class FakeKeeper:
    """Serves as soon as the test says so; ends when it is stopped."""

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        self._ended = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def stopping(self) -> bool:
        return self.state.state == "draining"

    @property
    def failed_to_start(self) -> bool:
        return False

    async def run(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.state.state = "draining"
        self._ended.set()

    def kill(self) -> None:
        self._ended.set()


class FakePools(SupervisedPools):
    """``told`` is who was told which role; ``error`` comes of it, once ``answers`` is set."""

    can_convert = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []
        self.error: Unavailable | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._number = 0

    def _keeper(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        self._number += 1
        return FakeKeeper(ProcessState(f"w{self._number}", role.value, 1, "starting"))

    def _change_role(self, keeper: SupervisedProcess, role: Role) -> None:
        keeper.state.role, keeper.state.state = role.value, "converting"

    async def _convert(self, keeper: SupervisedProcess) -> None:
        self.told.append((keeper.state.id, keeper.state.role))
        await self.answers.wait()
        if self.error is not None:
            raise self.error

    def serve(self, *names: str) -> None:
        for keeper in self.keepers:
            if not names or keeper.state.id in names:
                keeper.state.state = "serving"

    def there(self) -> dict[str, str]:
        return {
            keeper.state.id: f"{keeper.state.role} {keeper.state.state}" for keeper in self.keepers
        }


async def settle() -> None:
    """Tasks that wait for nothing have ended."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def house(prefill: int, decode: int) -> AsyncIterator[FakePools]:
    """w1, w2, …: first those that prefill."""
    pools = FakePools()
    async with asyncio.TaskGroup() as tasks:
        pools.open(tasks, lambda keeper: None)
        await pools.scale({PREFILL: prefill, DECODE: decode})
        pools.serve()
        yield pools
        pools.answers.set()
        pools.close()
        await pools.stop()


async def test_the_newest_that_serve_change_and_the_rest_is_as_ever() -> None:
    async with house(4, 1) as pools:
        await pools.scale({PREFILL: 1, DECODE: 3})
        await settle()
        assert pools.told == [("w4", "decode"), ("w3", "decode")]
        assert pools.there() == {
            "w1": "prefill serving",
            "w3": "decode converting",
            "w4": "decode converting",
            "w5": "decode serving",
        }
        assert await pools.sizes() == {PREFILL: 1, DECODE: 3}


async def test_what_nobody_gives_up_starts() -> None:
    async with house(2, 1) as pools:
        await pools.scale({DECODE: 3, PREFILL: 1})
        assert pools.there() == {
            "w1": "prefill serving",
            "w2": "decode converting",
            "w3": "decode serving",
            "w4": "decode starting",
        }


async def test_who_does_not_serve_is_replaced_and_nobody_who_does() -> None:
    async with house(1, 1) as pools:
        await pools.scale({PREFILL: 2})
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.there() == {
            "w1": "prefill serving", "w2": "decode serving", "w4": "decode starting",
        }  # fmt: skip
        assert pools.told == []


async def test_one_pool_alone_changes_nobodys_role() -> None:
    async with house(2, 1) as pools:
        await pools.scale({PREFILL: 1})
        await pools.scale({DECODE: 2})
        assert pools.told == []


async def test_both_grow_or_both_shrink() -> None:
    async with house(2, 2) as pools:
        await pools.scale({PREFILL: 3, DECODE: 3})
        pools.serve()
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert list(pools.there()) == ["w1", "w3", "w4"]
        assert pools.told == []


async def test_who_is_called_back_is_the_one_that_is_on_its_way() -> None:
    """And is told once more, after it has answered."""
    async with house(2, 1) as pools:
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        await pools.scale({PREFILL: 2, DECODE: 1})
        await settle()
        assert pools.told == [("w2", "decode")]
        pools.answers.set()
        await settle()
        assert pools.told == [("w2", "decode"), ("w2", "prefill")]
        assert pools.there()["w2"] == "prefill converting"


async def test_who_can_not_be_told_is_replaced() -> None:
    async with house(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.there() == {
            "w1": "prefill serving", "w3": "decode serving", "w4": "decode starting",
        }  # fmt: skip


async def test_who_died_meanwhile_comes_back_in_its_new_role() -> None:
    async with house(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 2})
        pools.keepers[1].state.state = "restarting"
        pools.answers.set()
        await settle()
        assert pools.there()["w2"] == "decode restarting"
        assert len(pools.keepers) == 3


async def test_who_was_sent_away_meanwhile_is_not_replaced() -> None:
    async with house(2, 2) as pools:
        pools.error = Unavailable("the worker leaves")
        pools.answers.clear()
        await pools.scale({PREFILL: 1, DECODE: 3})
        await settle()
        await pools.remove(WorkerId("w2"))
        pools.answers.set()
        await settle()
        assert list(pools.there()) == ["w1", "w3", "w4"]
        assert await pools.sizes() == {PREFILL: 1, DECODE: 2}


async def test_nobody_is_started_once_the_cluster_stops() -> None:
    async with house(2, 1) as pools:
        pools.error = Unavailable("nobody answers")
        await pools.scale({PREFILL: 1, DECODE: 2})
        pools.close()
        await settle()
        assert list(pools.there()) == ["w1", "w3"]


async def test_where_no_role_can_change_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePools, "can_convert", False)
    async with house(2, 1) as pools:
        await pools.scale({PREFILL: 1, DECODE: 2})
        await settle()
        assert pools.told == []
        assert list(pools.there()) == ["w1", "w3", "w4"]
