"""An event loop in virtual time, whose callbacks belong to simulated processes.

Every callback carries a context that names its process, so that the callbacks of a frozen process
wait until it thaws. Runs are deterministic: the clock jumps to the next timer, there are no sockets
and no threads, and a task's hash is its serial number.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from baton.concurrency.threads import RUN_INLINE
from tests.sim.whole.process import PROCESS

if TYPE_CHECKING:
    from tests.sim.whole.network import Network
    from tests.sim.whole.sockets import SimServer

T = TypeVar("T")

MAX_CALLBACKS = 2_000_000
"""The maximum number of callbacks in a run. A run has some ten thousand; reaching the bound means a
livelock."""


class TimerHandle:
    """A scheduled callback. It implements the part of ``asyncio.Handle`` that tasks and timeouts
    need."""

    __slots__ = ("_when", "args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object] | None, args: tuple[Any, ...], context: Context
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self._when = 0.0

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self._when


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its serial number, so that sets of tasks iterate in the same order in
    every real process."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop. ``network`` carries the connections that are opened on it."""

    network: "Network"

    def __init__(self) -> None:
        self._ready: deque[TimerHandle] = deque()
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._now = 0.0
        self._num_timers = 0
        self._num_tasks = 0
        self._closed = False
        self.num_callbacks = 0

    def time(self) -> float:
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the loop until ``main`` has finished; then cancel all other tasks."""
        token = RUN_INLINE.set(True)
        asyncio.events._set_running_loop(self)
        try:
            task = self.create_task(main)
            try:
                self._run_until(task)
            finally:
                self._end_all()
            result: T = task.result()
            return result
        finally:
            self._closed = True
            asyncio.events._set_running_loop(None)
            RUN_INLINE.reset(token)

    def resume(self, handles: Iterable[TimerHandle]) -> None:
        """Schedule the callbacks that a frozen process has missed, in their original order."""
        self._ready.extend(handles)

    def _end_all(self) -> None:
        """Cancel all tasks, so that nothing is left for the next run. Raise the first error of a
        callback after that."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        errors: list[Exception] = []
        for task in tasks:
            task.cancel()
        for task in tasks:
            while not task.done():
                before = self.num_callbacks
                try:
                    self._run_until(task)
                except Exception as error:
                    if not before < self.num_callbacks < MAX_CALLBACKS:
                        raise  # the task will never end
                    errors.append(error)
            if not task.cancelled():
                task.exception()
        if errors:
            raise errors[0]

    def _run_until(self, task: "asyncio.Task[Any]") -> None:
        ready, timers = self._ready, self._timers
        while not task.done():
            while not ready:
                assert timers, "deadlock: no callback is ready and no timer is set"
                self._now = max(self._now, timers[0][0])
                while timers and timers[0][0] <= self._now:
                    ready.append(heapq.heappop(timers)[2])
            self.num_callbacks += 1
            assert self.num_callbacks < MAX_CALLBACKS, "livelock: the run does not end"
            handle = ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            process = handle.context.get(PROCESS)
            if process is not None and process.frozen:
                process.backlog.append(handle)
            else:
                handle.context.run(callback, *handle.args)

    # -- the interface of an asyncio loop ----------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        handle = TimerHandle(callback, args, copy_context() if context is None else context)
        handle._when = when
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        self._num_tasks += 1
        task = NumberedTask.__new__(NumberedTask)
        task.number = self._num_tasks
        NumberedTask.__init__(task, coro, loop=self, name=name or "task", context=context)
        return task

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: Any
    ) -> Any:
        return await self.network.connect(PROCESS.get(), factory, f"{host}:{port}", "line")

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: Any
    ) -> "SimServer":
        return self.network.serve(PROCESS.get(), factory, f"{host}:{port}")

    def crash(self, error: BaseException) -> None:
        """Fail the run because of an error that a process has caught although it indicates a
        bug."""
        self.call_soon(_raise, error, context=self.network.context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        raise AssertionError(context.get("message")) from error


def _raise(error: BaseException) -> None:
    raise AssertionError(
        f"a process caught an exception that indicates a bug: {error!r}"
    ) from error


class SimClock:
    """The loop's time, as a :class:`baton.clock.Clock`."""

    def __init__(self, loop: SimLoop) -> None:
        self.monotonic = loop.time
        self.sleep = asyncio.sleep

    def wall_nanoseconds(self) -> int:
        return 1_000_000_000 + int(self.monotonic() * 1e9)
