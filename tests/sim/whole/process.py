"""A simulated process. When it freezes or dies, the callbacks and tasks in its context stop,
too."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError

if TYPE_CHECKING:
    from tests.sim.whole.loop import SimLoop, TimerHandle
    from tests.sim.whole.network import Call, Network, StreamEnd
    from tests.sim.whole.sockets import SimSocket

PROCESS: ContextVar["Process"] = ContextVar("process")


class Process:
    """A process. While it is ``frozen``, its callbacks, timers and messages wait for :meth:`thaw`.
    When it dies, it is cut off from the network before its tasks are cancelled, so that nothing
    that the tasks still send reaches a peer. ``vanished`` is set if its machine died, too, so that
    no kernel notifies its peers."""

    def __init__(self, name: str, network: "Network") -> None:
        self.name = name
        self.network = network
        self.loop: SimLoop = network.loop
        self.alive = True
        self.frozen = False
        self.vanished = False
        self.backlog: list[TimerHandle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.ends: dict[StreamEnd, None] = {}
        self.calls: dict[Call, None] = {}
        self.sockets: dict[SimSocket, None] = {}
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        network.processes.append(self)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self.loop.create_task(coroutine, context=self.context.copy())
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        self.loop.resume(backlog)

    def kill(self, *, vanishes: bool = False) -> None:
        """Kill the process as SIGKILL does or, if ``vanishes`` is set, as a power cut does: its
        peers are not notified of a power cut."""
        if self.alive:
            self.alive, self.vanished = False, vanishes
            self.network.cut(self)
            self.thaw()
            for task in list(self.tasks):
                task.cancel()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        del self.tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is None or not self.alive:
            return
        if isinstance(error, BatonError):
            self.kill()  # like a real process that exits because it can't continue
        else:
            raise AssertionError(f"{self.name} crashed: {error!r}") from error
