"""A simulated process: what runs in its context stands still with it, and ends with it."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError

if TYPE_CHECKING:
    from tests.sim.whole.loop import Handle, SimLoop
    from tests.sim.whole.network import Call, End, Network
    from tests.sim.whole.sockets import SimSocket

PROCESS: ContextVar["Process"] = ContextVar("process")


class Process:
    """``frozen``: its callbacks, timers and messages wait for :meth:`thaw`. Dead: its network is
    cut, then its tasks are cancelled, so that nothing of what they still do gets out. ``vanished``:
    its machine died with it, and no kernel tells its peers."""

    def __init__(self, name: str, network: "Network") -> None:
        self.name = name
        self.network = network
        self.loop: SimLoop = network.loop
        self.alive = True
        self.frozen = False
        self.vanished = False
        self.backlog: list[Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.ends: dict[End, None] = {}
        self.calls: dict[Call, None] = {}
        self.sockets: dict[SimSocket, None] = {}
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        network.processes.append(self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self.loop.create_task(work, context=self.context.copy())
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
        """As SIGKILL does, or a power cut: peers learn it from the network, or find out."""
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
            self.kill()  # as a program that can't go on
        else:
            raise AssertionError(f"{self.name} crashed: {error!r}") from error
