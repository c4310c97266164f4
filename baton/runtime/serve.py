"""One way to run a program: start, serve, drain, stop."""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from enum import StrEnum
from typing import Protocol

import structlog
from prometheus_client.registry import Collector

from baton.errors import BatonError
from baton.runtime.status import BEAT_SECONDS, STATUS, Report

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

STOP_SECONDS = 10.0
"""For a program to let go of everything, once it has drained."""

CRASH_DRAIN_SECONDS = 1.0
"""For what a crash has left working. The rest can't end, and its clients wait for a failover."""

GC_THRESHOLD = 50_000
"""Objects made and not freed; some ten megabytes."""


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


TRANSITIONS: dict[ProgramState, frozenset[ProgramState]] = {
    ProgramState.STARTING: frozenset(
        {ProgramState.SERVING, ProgramState.FAILED, ProgramState.STOPPED}
    ),
    ProgramState.SERVING: frozenset({ProgramState.DRAINING, ProgramState.FAILED}),
    ProgramState.DRAINING: frozenset({ProgramState.STOPPED, ProgramState.FAILED}),
    ProgramState.STOPPED: frozenset(),
    ProgramState.FAILED: frozenset(),
}


class Lifecycle:
    """Runs one program through its states, and reports each."""

    def __init__(self, program: Program, drain_seconds: float) -> None:
        self.state = ProgramState.STARTING
        self.has_served = False
        self._program = program
        self._drain_seconds = drain_seconds
        self._asked = asyncio.Event()
        self._asked_twice = asyncio.Event()

    def ask_to_stop(self) -> None:
        """Once: drain. Twice: at once."""
        (self._asked_twice if self._asked.is_set() else self._asked).set()

    async def run(self) -> None:
        """Until asked to stop. Raises what ended the program otherwise."""
        STATUS.send(Report(self.state.value))
        try:
            if await self._start():
                await self._serve()
        except BaseException as error:
            self._move(ProgramState.FAILED, message=str(error) or type(error).__name__)
            raise
        finally:
            await self._stop()
        self._move(ProgramState.STOPPED)

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._program.stop()
        except TimeoutError:
            log.warning("stop_took_too_long", seconds=STOP_SECONDS)

    async def _start(self) -> bool:
        """False when it was asked to stop meanwhile."""
        starting: asyncio.Future[object] = asyncio.ensure_future(self._program.start())
        asked: asyncio.Future[object] = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return not self._asked.is_set()
            return False
        finally:
            for task in (starting, asked):
                task.cancel()
            await asyncio.wait([starting, asked])

    async def _serve(self) -> None:
        running: asyncio.Future[object] = asyncio.ensure_future(self._program.run())
        asked: asyncio.Future[object] = asyncio.ensure_future(self._asked.wait())
        beating: asyncio.Future[object] = asyncio.ensure_future(_beat())
        try:
            self.has_served = True
            self._move(ProgramState.SERVING, address=self._program.address)
            await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
            self._move(ProgramState.DRAINING)
            await self._drain(running)
            if running.done():
                running.result()
        finally:
            for task in (running, asked, beating):
                task.cancel()
            await asyncio.wait([running, asked, beating])

    async def _drain(self, running: "asyncio.Future[object]") -> None:
        """For ``drain_seconds`` at most, or until asked again, or the program crashes."""
        draining: asyncio.Future[object] = asyncio.ensure_future(self._program.drain())
        twice: asyncio.Future[object] = asyncio.ensure_future(self._asked_twice.wait())
        enders, seconds = {draining, twice, running}, self._drain_seconds
        if running.done():
            enders, seconds = {draining, twice}, min(seconds, CRASH_DRAIN_SECONDS)
        await asyncio.wait(enders, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, twice):
            task.cancel()
        await asyncio.wait([draining, twice])
        if not draining.cancelled() and draining.exception() is not None:
            log.warning("drain_failed", error=repr(draining.exception()))

    def _move(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
        STATUS.send(Report(state.value, address=address, message=message))
        log.info("program", state=state.value, address=address, message=message)


async def _beat() -> None:
    """From the event loop: who can't take its turn there can't serve either."""
    while True:
        STATUS.beat()
        await asyncio.sleep(BEAT_SECONDS)


def serve(program: Program, drain_seconds: float) -> None:
    """Runs ``program`` in an event loop of its own until SIGTERM or SIGINT. Raises BatonError
    for what the world does, anything else for a bug."""
    import uvloop

    lifecycle = Lifecycle(program, drain_seconds)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.ask_to_stop)
        await lifecycle.run()
        if not lifecycle.has_served:
            # A thread may be loading weights still, and can't be told to stop.
            sys.stderr.flush()
            os._exit(0)

    _calm_collector()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except BaseExceptionGroup as group:
        error = only_error(group)
        if error is None:
            raise
        raise error from group


def _calm_collector() -> None:
    """What was imported is never garbage, and is not looked at again; the rest is looked at less
    often: a busy router spent a quarter of its time on it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def only_error(group: BaseExceptionGroup[BaseException]) -> BatonError | None:
    """The first error of ours, if nothing else is in the group: a bug is never hidden."""
    ours, bugs = group.split(BatonError)
    if ours is None or bugs is not None:
        return None
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, however that ends.
    For between fork and exec: it imports nothing and takes no lock."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
