"""Tests what the console asks others for: a supervisor, conductors or stores that answer late or
not at all delay no frame for long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from baton.clock import ManualClock
from baton.core.states import Role, WorkerState
from router.console.cluster_reader import REMOTE_INTERVAL_SECONDS, PoolsReader, RemoteReader
from router.generation.cluster import Cluster
from tests.router_harness import StaticMembers, member

POOLS = {"sizes": {"prefill": 1}, "workers": []}


class Supervisor:
    """Answers each command as soon as ``may_answer`` is set."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_answer = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_calls += 1
        await reader.readline()
        await self.may_answer.wait()
        writer.write(json.dumps({"answer": POOLS}).encode() + b"\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def open_supervisor(path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    async with await asyncio.start_unix_server(supervisor.handle, str(path)):
        yield supervisor


async def test_late_supervisor_delays_no_frame(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with open_supervisor(path) as supervisor:
        reader = PoolsReader(str(path))
        for _ in range(3):  # the same call is under way each time
            async with asyncio.timeout(60):
                await reader.refresh()
        assert (reader.pools, reader.error, supervisor.num_calls) == (None, "", 1)
        supervisor.may_answer.set()
        async with asyncio.timeout(60):
            while reader.pools is None:
                await reader.refresh()
        assert reader.pools == POOLS


async def test_last_answer_stays_when_the_supervisor_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with open_supervisor(path) as supervisor:
        supervisor.may_answer.set()
        reader = PoolsReader(str(path))
        await reader.refresh()
    await reader.refresh()
    assert reader.pools == POOLS
    assert "the supervisor does not answer" in reader.error


async def test_stores_and_conductors_that_are_gone_are_reported_now_and_then() -> None:
    clock = ManualClock(100.0)
    gone = [member("s0", Role.KVSTORE), member("c0", Role.CONDUCTOR)]
    members = StaticMembers([replace(each, address="127.0.0.1:1") for each in gone])
    cluster = Cluster(members, clock)
    await cluster.refresh()
    reader = RemoteReader(cluster, clock, None)
    async with asyncio.timeout(60):
        await reader.refresh()
    assert reader.plans == []
    assert reader.stores["s0"]["error"]
    members.list = [replace(each, state=WorkerState.DRAINING) for each in members.list]
    await cluster.refresh()
    await reader.refresh()
    assert list(reader.stores) == ["s0"]  # not yet time to ask again
    clock.advance(REMOTE_INTERVAL_SECONDS)
    await reader.refresh()
    assert reader.stores == {}
