"""One way to run a program: start, serve, drain, stop."""

import asyncio
import contextlib
import ctypes
import signal
from enum import StrEnum
from typing import Protocol

import structlog

from baton.errors import BatonError
from baton.runtime.status import STATUS, Report

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


class Program(Protocol):
    """What :func:`serve` runs. ``start`` returns once requests can be taken."""

    @property
    def address(self) -> str:
        """host:port, from ``start`` on."""
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
            await self._program.stop()
        self._move(ProgramState.STOPPED)

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
        try:
            self._move(ProgramState.SERVING, address=self._program.address)
            await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
            crash = running.exception() if running.done() else None
            if crash is None:
                self._move(ProgramState.DRAINING)
            await self._drain(running)
            if crash is not None:
                raise crash
        finally:
            for task in (running, asked):
                task.cancel()
            await asyncio.wait([running, asked])

    async def _drain(self, running: "asyncio.Future[object]") -> None:
        """For ``drain_seconds`` at most, or until asked again, or the program has ended."""
        if running.done():
            return
        draining: asyncio.Future[object] = asyncio.ensure_future(self._program.drain())
        twice: asyncio.Future[object] = asyncio.ensure_future(self._asked_twice.wait())
        await asyncio.wait(
            [draining, twice, running],
            timeout=self._drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (draining, twice):
            task.cancel()
        await asyncio.wait([draining, twice])

    def _move(self, state: ProgramState, *, address: str = "", message: str = "") -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state
        STATUS.send(Report(state.value, address=address, message=message))
        log.info("program", state=state.value, address=address, message=message)


def serve(program: Program, drain_seconds: float) -> None:
    """Runs ``program`` in an event loop of its own until SIGTERM or SIGINT. Raises BatonError
    for what the world does, anything else for a bug."""
    import uvloop

    async def main() -> None:
        lifecycle = Lifecycle(program, drain_seconds)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.ask_to_stop)
        await lifecycle.run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except* BatonError as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    """The first error in a group of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends, however that ends."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
