"""What runs on a node of Ray: an actor that keeps one worker's process alive.

The worker is the ordinary program (``baton serve ROLE``) in a process of its own: what crashes it
does not take the actor along, its threads and environment are as everywhere, and the kernel ends
it with the actor.
"""

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from baton.clock import SystemClock
from baton.config import baton_home, child_environment, thread_environment
from orchestrator.child_process import ChildProcess, ChildProcessSpec
from orchestrator.launch_specs import RemoteWorkerSpec


class WorkerActor:
    """Arguments and answers are plain values. ``order`` are the fields of an
    :class:`~orchestrator.launch_specs.RemoteWorkerSpec`; ``networked`` says that the worker listens
    on its node's own address, for other nodes."""

    def __init__(self, order: dict[str, Any], networked: bool) -> None:
        self._order = RemoteWorkerSpec(**order)
        self._ip = ray.util.get_node_ip_address()
        spec = self._spec(self._ip if networked else None)
        self._child = ChildProcess(
            spec,
            SystemClock(),
            self._notice,
            self._order.drain_seconds,
            self._order.hung_seconds,
        )
        self._life: asyncio.Task[None] | None = None
        self._number = 0
        self._changed = asyncio.Event()

    async def follow(self, seen: int) -> dict[str, Any]:
        """The worker's state, once there is another than number ``seen``. The first call starts
        the worker. For one caller at a time."""
        if self._life is None:
            self._life = asyncio.create_task(self._live())
        while self._number == seen:
            self._changed.clear()
            await self._changed.wait()
        return {
            "number": self._number,
            "state": asdict(self._child.state),
            "ended": self._life.done(),
            "failed_to_start": self._child.failed_to_start,
            "ip": self._ip,
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    async def stop(self) -> None:
        """Drains the worker; returns when it has ended."""
        await self._child.stop()

    async def _live(self) -> None:
        await self._child.run()
        # Once more: only now this task is about to be done.
        asyncio.get_running_loop().call_soon(self._notice, self._child)

    def _notice(self, child: ChildProcess) -> None:
        self._number += 1
        self._changed.set()

    def _spec(self, listen_at: str | None) -> ChildProcessSpec:
        order = self._order
        here = {"grpc_host": listen_at} if listen_at else {}
        environment = child_environment(order.settings | here, thread_environment(order.threads))
        command = (sys.executable, *order.command)
        return ChildProcessSpec(order.id, order.role, command, environment, self._log())

    def _log(self) -> Path:
        """Where ``baton logs`` looks, if this is the supervisor's machine."""
        there = Path(self._order.home)
        path = (there if there.is_dir() else baton_home()) / self._order.log
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
