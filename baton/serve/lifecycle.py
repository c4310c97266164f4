"""A program's lifecycle: start, serve, drain, stop."""

import asyncio
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import structlog
from prometheus_client.registry import Collector

from baton.config import Settings
from baton.errors import Unavailable
from baton.serve.settings_watcher import SettingsWatcher
from baton.serve.status_pipe import HEARTBEAT_SECONDS, STATUS, StatusReport

log = structlog.get_logger(__name__)

STOP_SECONDS = 10.0
"""Time for a program to free its resources, once it has drained."""

CRASH_DRAIN_SECONDS = 1.0
"""Drain time after a crash, for the parts of the program that still work. The requests in other
parts can't finish, and their clients wait for a failover."""


class LoadStalled(Unavailable):
    """Loading the weights has stalled. The thread that loads them can't be stopped."""


class Program(Protocol):
    """A program for :func:`serve` to run. ``start`` returns once the program can accept
    requests."""

    @property
    def address(self) -> str:
        """The program's address (host:port), which is known once ``start`` has returned."""
        ...

    @property
    def metrics(self) -> Collector:
        """The metrics for ``GET /metrics`` of the ops server: the program's own CollectorRegistry,
        or one collector. It exists from the beginning, and a thread of the ops server may collect
        it at any time: so a collector reads only objects that are replaced as a whole, and never
        blocks or awaits."""
        ...

    async def start(self) -> None: ...

    async def run(self) -> None:
        """Serve until cancelled. If the program can't continue, raise the reason."""
        ...

    async def drain(self) -> None:
        """Accept no new work, and return when all accepted work is done."""
        ...

    async def stop(self) -> None:
        """Free all resources. Called in any case, even if the program has failed."""
        ...


@runtime_checkable
class AppliesSettings(Protocol):
    """A program that has live settings besides the log level. A live setting can change while the
    program runs."""

    async def apply_settings(self, settings: Settings) -> None:
        """From now on, use the values that ``settings`` has for the live settings. Called while the
        program serves."""
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
    """Runs one program through its states, and reports each state. After :meth:`request_stop` the
    program drains, and then stops. While it serves, ``settings_watcher`` runs, too."""

    def __init__(
        self,
        program: Program,
        drain_timeout_seconds: float,
        ops_address: str = "",
        settings_watcher: SettingsWatcher | None = None,
    ) -> None:
        self.state = ProgramState.STARTING
        self.has_served = False
        self._program = program
        self._drain_timeout_seconds = drain_timeout_seconds
        self._ops_address = ops_address
        self._settings_watcher = settings_watcher
        if settings_watcher is not None and isinstance(program, AppliesSettings):
            settings_watcher.subscribe(program.apply_settings)
        self._stop_requested = asyncio.Event()
        self._stop_now_requested = asyncio.Event()

    def request_stop(self, is_interrupt: bool = False) -> None:
        """Drain, then stop. If a stop has been requested before, an interrupt (Ctrl-C) ends the
        drain, so that the program stops at once; any other call has no effect."""
        if is_interrupt and self._stop_requested.is_set():
            self._stop_now_requested.set()
        self._stop_requested.set()

    async def run(self) -> None:
        """Run the program until it is asked to stop. If an error ends it earlier, raise that
        error."""
        STATUS.health.start()
        self._report(ProgramState.STARTING)
        heartbeat: asyncio.Future[object] = asyncio.ensure_future(_send_heartbeats())
        try:
            if await self._start():
                await self._serve()
        except BaseException as error:
            self._move(ProgramState.FAILED, message=str(error) or type(error).__name__)
            raise
        finally:
            await self._stop()
            heartbeat.cancel()
            await asyncio.wait([heartbeat])
        self._move(ProgramState.STOPPED)

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._program.stop()
        except TimeoutError:
            log.warning("stop_took_too_long", seconds=STOP_SECONDS)

    async def _start(self) -> bool:
        """Start the program. Return False if it was asked to stop meanwhile. Raises LoadStalled if
        loading the weights stalls."""
        starting: asyncio.Future[object] = asyncio.ensure_future(self._program.start())
        stalling: asyncio.Future[object] = asyncio.ensure_future(_raise_when_stalled())
        try:
            await _wait_for_first(starting, stalling, self._stop_requested)
            for ended in (starting, stalling):
                if ended.done():
                    ended.result()
            return not self._stop_requested.is_set()
        finally:
            await _cancel(starting, stalling)

    async def _serve(self) -> None:
        running: asyncio.Future[object] = asyncio.ensure_future(self._program.run())
        watching: list[asyncio.Future[object]] = []
        if self._settings_watcher is not None:
            watching.append(asyncio.ensure_future(self._settings_watcher.run()))
        try:
            self.has_served = True
            self._move(ProgramState.SERVING, address=self._program.address)
            await _wait_for_first(running, self._stop_requested)
            self._move(ProgramState.DRAINING)
            await self._drain(running)
            if running.done():
                running.result()
        finally:
            await _cancel(running, *watching)

    async def _drain(self, running: "asyncio.Future[object]") -> None:
        """Drain until all work is done, the program crashes, it is to stop at once, or
        ``drain_timeout_seconds`` have passed. If the program crashed before the drain (``running``
        is done), drain only briefly."""
        waits, seconds = [running], self._drain_timeout_seconds
        if running.done():
            waits, seconds = [], min(seconds, CRASH_DRAIN_SECONDS)
        draining: asyncio.Future[object] = asyncio.ensure_future(self._program.drain())
        try:
            await _wait_for_first(draining, *waits, self._stop_now_requested, timeout=seconds)
        finally:
            await _cancel(draining)
            if not draining.cancelled() and draining.exception() is not None:
                log.warning("drain_failed", error=repr(draining.exception()))

    def _move(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        assert state in PROGRAM_TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
        self._report(state, address=address, message=message)
        log.info("program", state=state.value, address=address, message=message)

    def _report(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        STATUS.health.set_state(state.value)
        STATUS.send(
            StatusReport(state.value, address=address, message=message, ops=self._ops_address)
        )


async def _wait_for_first(
    *waits: "asyncio.Event | asyncio.Future[object]", timeout: float | None = None
) -> None:
    """Return when one of ``waits`` is set or done, or after ``timeout``. Cancels none of them."""
    events = [asyncio.ensure_future(w.wait()) for w in waits if isinstance(w, asyncio.Event)]
    all_waits: list[asyncio.Future[Any]] = [*events]
    all_waits += [wait for wait in waits if not isinstance(wait, asyncio.Event)]
    try:
        await asyncio.wait(all_waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(*events)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _raise_when_stalled() -> None:
    """Run until loading the weights stalls, then raise LoadStalled."""
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        stall = STATUS.health.describe_stalled_load()
        if stall:
            raise LoadStalled(stall)


async def _send_heartbeats() -> None:
    """Send heartbeats from the event loop while the process can serve. So there are none while the
    event loop is blocked, and none while the engine waits for a device that does not answer."""
    while True:
        STATUS.health.record_heartbeat()
        if not STATUS.health.describe_unanswered_wait():
            STATUS.send_heartbeat()
        await asyncio.sleep(HEARTBEAT_SECONDS)
