"""The thread that owns an engine, and the handle through which other code runs commands in it."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from baton.engine.engine import Engine, StepResult
from baton.errors import BatonError, Overloaded, Unavailable
from baton.worker.limits import MAX_COMMANDS

T = TypeVar("T")


class EngineHandle(Protocol):
    """Runs commands on the engine for the other parts of the worker. The in-memory implementation
    for tests runs them inline."""

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run ``command`` between two steps and return its value. Cancelling the caller does not
        stop the command. Raises what the command raises, Overloaded if too many commands wait,
        Unavailable if the engine has stopped. An unexpected exception in a command is raised to the
        caller only, unless the engine's integrity check then fails, which also stops the engine."""
        ...

    def send(self, command: Callable[[Engine], object]) -> None:
        """Run ``command``, which releases resources and must not raise, between two steps.

        The command is never refused, since otherwise blocks would leak. The number of such commands
        is bounded by the number of accepted calls. Once the engine has stopped, which frees all
        blocks, this does nothing.
        """
        ...


class EngineThread:
    """Runs commands in order, steps the engine while it has work, and closes it at the end.

    ``on_step`` is called in the event loop with each step's result. ``on_crash`` is called with the
    exception that ended the thread, whether a bug or the device caused it; the worker must then
    stop, since the contents of the KV pool are unknown.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepResult], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_crash = on_crash
        self._commands: deque[Callable[[Engine], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop after the current step; later calls raise Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def call(self, command: Callable[[Engine], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(engine: Engine) -> None:
            try:
                value = command(engine)
            except Exception as error:
                self._post(_fail, future, error)
                if not isinstance(error, BatonError):
                    engine.check_integrity()
            else:
                self._post(_resolve, future, value)

        with self._wake:
            if self._stopping:
                raise Unavailable("the engine has stopped")
            if len(self._commands) >= MAX_COMMANDS:
                raise Overloaded("too many requests wait for the engine")
            self._commands.append(run)
            self._wake.notify()
        return await future

    def send(self, command: Callable[[Engine], object]) -> None:
        with self._wake:
            if not self._stopping:
                self._commands.append(command)
                self._wake.notify()

    def _main(self) -> None:
        try:
            while self._await_work():
                self._run_commands()
                if self._engine.has_work():
                    self._post(self._on_step, self._engine.step())
        except BaseException as error:
            with self._wake:
                self._stopping = True  # later calls raise Unavailable
            self._post(self._on_crash, error)
        finally:
            self._engine.close()

    def _await_work(self) -> bool:
        """Block until there is work. Return False once the thread is to stop."""
        with self._wake:
            while not (self._stopping or self._commands or self._engine.has_work()):
                self._wake.wait()
            return not self._stopping

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self._engine)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        loop = self._loop
        assert loop is not None, "start() must be called first"
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, *args)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
