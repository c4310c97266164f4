"""One way to run a program: start, serve, drain, stop."""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from enum import StrEnum
from typing import Any, Protocol

import structlog
from prometheus_client.registry import Collector

from baton.errors import BatonError, Unavailable
from baton.runtime.last_words import last_words
from baton.runtime.ops import OpsServer
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


class Stalled(Unavailable):
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
        assert state in TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
        self._report(state, address=address, message=message)
        log.info("program", state=state.value, address=address, message=message)

    def _report(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        STATUS.vitals.move(state.value)
        STATUS.send(Report(state.value, address=address, message=message, ops=self._ops_address))


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
        await asyncio.sleep(BEAT_SECONDS)
        stall = STATUS.vitals.stall()
        if stall:
            raise Stalled(stall)


async def _beat() -> None:
    """From the event loop: who can't take its turn there can't serve either."""
    while True:
        STATUS.beat()
        await asyncio.sleep(BEAT_SECONDS)


def serve(program: Program, drain_seconds: float, ops: OpsServer, ops_address: str = "") -> None:
    """Runs ``program`` in an event loop of its own until SIGTERM or SIGINT. ``ops`` tells others
    how it is. Raises BatonError for what the world does, anything else for a bug."""
    import uvloop

    lifecycle = Lifecycle(program, drain_seconds, ops_address)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.ask_to_stop)

        def drain() -> None:
            loop.call_soon_threadsafe(lifecycle.ask_to_drain)

        ops.watch(program.metrics, drain)
        try:
            await lifecycle.run()
        except Stalled as error:
            last_words(error)
            _leave_threads(1)
        if not lifecycle.has_served:
            _leave_threads(0)

    _calm_collector()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except BaseExceptionGroup as group:
        error = only_error(group)
        if error is None:
            raise
        raise error from group
    finally:
        STATUS.vitals.end()


def _leave_threads(code: int) -> None:
    """A thread may be loading weights still, and can't be told to stop."""
    sys.stderr.flush()
    os._exit(code)


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
