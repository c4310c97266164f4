"""An event loop in virtual time, whose callbacks belong to simulated processes.

Whatever is scheduled carries a context, and the context names a process: so a frozen process
keeps its callbacks to itself until it thaws. A clock that jumps to the next timer, no sockets,
no threads, and tasks whose hashes are numbers: one seed gives one run.
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
"""Of a run, which has some ten thousand: more, and it goes round in circles."""


class Handle:
    """A callback to come. Implements what tasks and time-outs need of ``asyncio.Handle``."""

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
    """In sets of tasks the order is that of their birth, in every process."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """``network`` carries its connections."""

    network: "Network"

    def __init__(self) -> None:
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._now = 0.0
        self._num_timers = 0
        self._num_tasks = 0
        self._closed = False
        self.num_callbacks = 0

    def time(self) -> float:
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs ``main`` to its end, and everything else as long as that takes."""
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

    def resume(self, handles: Iterable[Handle]) -> None:
        """What a frozen process has missed, in its order."""
        self._ready.extend(handles)

    def _end_all(self) -> None:
        """Nothing is left behind: the next run has the machine for itself."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        for task in tasks:
            task.cancel()
        for task in tasks:
            self._run_until(task)
            if not task.cancelled():
                task.exception()

    def _run_until(self, task: "asyncio.Task[Any]") -> None:
        ready, timers = self._ready, self._timers
        while not task.done():
            while not ready:
                assert timers, "everybody waits for somebody else"
                self._now = max(self._now, timers[0][0])
                while timers and timers[0][0] <= self._now:
                    ready.append(heapq.heappop(timers)[2])
            self.num_callbacks += 1
            assert self.num_callbacks < MAX_CALLBACKS, "it never comes to rest"
            handle = ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            process = handle.context.get(PROCESS)
            if process is not None and process.frozen:
                process.backlog.append(handle)
            else:
                handle.context.run(callback, *handle.args)

    # -- what asyncio asks of a loop ---------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
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
        """Ends the run with what some process caught and only logged."""
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
    raise AssertionError(f"a process caught a bug: {error!r}") from error


class SimClock:
    """The loop's time, as a :class:`baton.clock.Clock`."""

    def __init__(self, loop: SimLoop) -> None:
        self.monotonic = loop.time
        self.sleep = asyncio.sleep

    def wall_nanoseconds(self) -> int:
        return 1_000_000_000 + int(self.monotonic() * 1e9)
