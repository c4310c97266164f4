"""Tests that the simulated event loop behaves like asyncio's and uvloop's when a connection attempt
is cancelled."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from tests.sim.whole.loop import SimLoop
from tests.sim.whole.network import Network
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom

Work = Callable[[int], Coroutine[None, None, None]]
ANY_PORT, SIMULATED_PORT = 0, 2


class Near(asyncio.Protocol):
    """The protocol of the connecting end. Once connected, it cancels ``opening``, the task that
    waits for the connection, before that task runs again."""

    opening: "asyncio.Task[None]"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        asyncio.get_running_loop().call_soon(self.opening.cancel)


class Far(asyncio.Protocol):
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()


async def cancel_as_it_opens(port: int) -> None:
    loop, near, far = asyncio.get_running_loop(), Near(), Far()
    server = await loop.create_server(lambda: far, "127.0.0.1", port)
    bound = server.sockets[0].getsockname()[1]

    async def connect() -> None:
        await loop.create_connection(lambda: near, "127.0.0.1", bound)

    near.opening = loop.create_task(connect())
    await asyncio.wait([near.opening])
    assert near.opening.cancelled() and near.transport is not None
    async with asyncio.timeout(60):
        await far.closed.wait()
    server.close()


def run_on_asyncio(work: Work) -> None:
    asyncio.run(work(ANY_PORT))


def run_on_uvloop(work: Work) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(ANY_PORT))


def run_in_virtual_time(work: Work) -> None:
    loop = SimLoop()  # type: ignore[abstract]

    async def main() -> None:
        await Process("one", Network(loop, SeededRandom(0))).start_task(work(SIMULATED_PORT))

    loop.run(main())


@pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop, run_in_virtual_time])
def test_connection_whose_opener_is_cancelled_is_closed(run: Callable[[Work], None]) -> None:
    """The attempt is cancelled just when the connection is established. This happens to a process
    that was frozen while it connected: when it thaws, the connection is open, but the timeout of
    the attempt has expired, too."""
    run(cancel_as_it_opens)
