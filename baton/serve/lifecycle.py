"""A program's life: start, serve, drain, stop."""

import asyncio
from enum import StrEnum
from typing import Any, Protocol

import structlog
from prometheus_client.registry import Collector

from baton.errors import Unavailable
from baton.serve.status_pipe import HEARTBEAT_SECONDS, STATUS, StatusReport

log = structlog.get_logger(__name__)

STOP_SECONDS = 10.0
"""For a program to let go of everything, once it has drained."""

CRASH_DRAIN_SECONDS = 1.0
"""For what a crash has left working. The rest can't end, and its clients wait for a failover."""


class LoadStalled(Unavailable):
    """A load stands still. The thread that waits for it can't be told to stop."""


class Program(Protocol):
    """What :func:`serve` runs. ``start`` returns once requests can be taken."""

    @property
    def address(self) -> str:
        """host:port, from ``start`` on."""
        ...

    @property
    def metrics(self) -> Collector:
        """What ``GET /metrics`` of the ops server tells: a CollectorRegistry of the program's own,
        in which its parts register what they count, or one collector. It is there from the
        beginning, and collected from a thread of the ops server, at any time: a collector reads
        what is replaced as a whole, and neither waits nor awaits."""
        ...

    async def start(self) -> None: ...

    async def run(self) -> None:
        """Serves until cancelled; raises if it can't go on."""
        ...

    async def drain(self) -> None:
        """Takes nothing new, and returns when what was taken is done."""
        ...

    async def stop(self) -> None:
        """Lets go of everything. Called in whatever way the program ends."""
        ...


class ProgramState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


PROGRAM_TRANSITIONS: dict[ProgramState, frozenset[ProgramState]] = {
    ProgramState.STARTING: frozenset(
        {ProgramState.SERVING, ProgramState.FAILED, ProgramState.STOPPED}
    ),
    ProgramState.SERVING: frozenset({ProgramState.DRAINING, ProgramState.FAILED}),
    ProgramState.DRAINING: frozenset({ProgramState.STOPPED, ProgramState.FAILED}),
    ProgramState.STOPPED: frozenset(),
    ProgramState.FAILED: frozenset(),
}


class Lifecycle:
    """Runs one program through its states, and reports each. Told to leave, it drains: by
    :meth:`ask_to_stop` it ends then, by :meth:`ask_to_drain` it waits to be asked to stop."""

    def __init__(self, program: Program, drain_seconds: float, ops_address: str = "") -> None:
        self.state = ProgramState.STARTING
        self.has_served = False
        self._program = program
        self._drain_seconds = drain_seconds
        self._ops_address = ops_address
        self._leave = asyncio.Event()
        self._asked = asyncio.Event()
        self._asked_twice = asyncio.Event()

    def ask_to_stop(self) -> None:
        """Once: drain. Twice: at once."""
        (self._asked_twice if self._asked.is_set() else self._asked).set()
        self._leave.set()

    def ask_to_drain(self) -> None:
        """Idempotent. Whoever has drained when it is asked to stop ends at once; who has not has
        the rest of its time."""
        self._leave.set()

    async def run(self) -> None:
        """Until asked to stop. Raises what ended the program otherwise."""
        STATUS.vitals.begin()
        self._report(ProgramState.STARTING)
        beating: asyncio.Future[object] = asyncio.ensure_future(_beat())
        try:
            if await self._start():
                await self._serve()
            else:
                await self._wait_to_be_stopped()
        except BaseException as error:
            self._move(ProgramState.FAILED, message=str(error) or type(error).__name__)
            raise
        finally:
            await self._stop()
            beating.cancel()
            await asyncio.wait([beating])
        self._move(ProgramState.STOPPED)

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._program.stop()
        except TimeoutError:
            log.warning("stop_took_too_long", seconds=STOP_SECONDS)

    async def _start(self) -> bool:
        """False when it was told to leave meanwhile. Raises Stalled for a load that stands
        still."""
        starting: asyncio.Future[object] = asyncio.ensure_future(self._program.start())
        stalling: asyncio.Future[object] = asyncio.ensure_future(_until_stalled())
        try:
            await _first(starting, stalling, self._leave)
            for ended in (starting, stalling):
                if ended.done():
                    ended.result()
            return not self._leave.is_set()
        finally:
            await _end(starting, stalling)

    async def _serve(self) -> None:
        running: asyncio.Future[object] = asyncio.ensure_future(self._program.run())
        try:
            self.has_served = True
            self._move(ProgramState.SERVING, address=self._program.address)
            await _first(running, self._leave)
            self._move(ProgramState.DRAINING)
            await self._drain(running)
            if running.done():
                running.result()
        finally:
            await _end(running)

    async def _drain(self, running: "asyncio.Future[object]") -> None:
        """Until it is done, or asked twice, or the program crashes; and, for who is to stop, for
        ``drain_seconds`` since it began at most."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._drain_seconds
        draining: asyncio.Future[object] = asyncio.ensure_future(self._program.drain())
        try:
            if running.done():
                seconds = min(self._drain_seconds, CRASH_DRAIN_SECONDS)
                await _first(draining, self._asked_twice, timeout=seconds)
                return
            await _first(draining, running, self._asked)
            left = max(until - loop.time(), 0.0)
            await _first(draining, running, self._asked_twice, timeout=left)
        finally:
            await _end(draining)
            if not draining.cancelled() and draining.exception() is not None:
                log.warning("drain_failed", error=repr(draining.exception()))
        await self._wait_to_be_stopped(running)

    async def _wait_to_be_stopped(self, *running: "asyncio.Future[object]") -> None:
        """Nothing is left to do."""
        STATUS.vitals.drained = True
        await _first(self._asked, *running)

    def _move(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        assert state in PROGRAM_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
        self._report(state, address=address, message=message)
        log.info("program", state=state.value, address=address, message=message)

    def _report(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        STATUS.vitals.move(state.value)
        STATUS.send(
            StatusReport(state.value, address=address, message=message, ops=self._ops_address)
        )


async def _first(
    *waits: "asyncio.Event | asyncio.Future[object]", timeout: float | None = None
) -> None:
    """Returns when one of them has happened, or time is up. What is under way goes on."""
    events = [asyncio.ensure_future(w.wait()) for w in waits if isinstance(w, asyncio.Event)]
    all_waits: list[asyncio.Future[Any]] = [*events]
    all_waits += [wait for wait in waits if not isinstance(wait, asyncio.Event)]
    try:
        await asyncio.wait(all_waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(*events)


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _until_stalled() -> None:
    """Raises Stalled when what is being loaded stands still."""
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        stall = STATUS.vitals.stall()
        if stall:
            raise LoadStalled(stall)


async def _beat() -> None:
    """From the event loop: who can't take its turn there can't serve either; nor can who waits for
    a device that never answers."""
    while True:
        STATUS.vitals.beat()
        if not STATUS.vitals.silence():
            STATUS.beat()
        await asyncio.sleep(HEARTBEAT_SECONDS)
