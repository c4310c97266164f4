"""The Ray actor that keeps one worker's process alive on a Ray node.

The worker is the usual ``baton serve ROLE`` in its own process. Therefore, the actor survives a
crash of the worker, and the worker has the same threads and environment as with other backends.
When the actor dies, the kernel kills the worker.
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
    """Supervises one worker. Its methods take and return plain values. ``spec`` holds the fields of
    a :class:`~orchestrator.launch_specs.RemoteWorkerSpec`. If ``spans_machines`` is true, the
    worker listens on its node's own address, which other nodes can reach."""

    def __init__(self, spec: dict[str, Any], spans_machines: bool) -> None:
        self._spec = RemoteWorkerSpec(**spec)
        self._ip = ray.util.get_node_ip_address()
        self._child = ChildProcess(
            self._child_spec(self._ip if spans_machines else None),
            SystemClock(),
            self._on_child_change,
            self._spec.drain_timeout_seconds,
            self._spec.hang_timeout_seconds,
        )
        self._run_task: asyncio.Task[None] | None = None
        self._state_number = 0
        self._changed = asyncio.Event()

    async def follow(self, seen: int) -> dict[str, Any]:
        """Wait until the worker's state is newer than state number ``seen``, and return it. The
        first call starts the worker. There must be only one caller at a time."""
        if self._run_task is None:
            self._run_task = asyncio.create_task(self._run_child())
        while self._state_number == seen:
            self._changed.clear()
            await self._changed.wait()
        return {
            "number": self._state_number,
            "state": asdict(self._child.state),
            "ended": self._run_task.done(),
            "failed_to_start": self._child.has_failed_to_start,
            "ip": self._ip,
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    async def stop(self) -> None:
        """Drain the worker; return when it has exited."""
        await self._child.stop()

    async def _run_child(self) -> None:
        await self._child.run()
        # Report once more after this task is done, so that `follow` returns "ended".
        asyncio.get_running_loop().call_soon(self._on_child_change, self._child)

    def _on_child_change(self, child: ChildProcess) -> None:
        self._state_number += 1
        self._changed.set()

    def _child_spec(self, listen_at: str | None) -> ChildProcessSpec:
        spec = self._spec
        here = {"grpc_host": listen_at} if listen_at else {}
        environment = child_environment(spec.settings | here, thread_environment(spec.threads))
        command = (sys.executable, *spec.command)
        return ChildProcessSpec(spec.id, spec.role, command, environment, self._log())

    def _log(self) -> Path:
        """Return the path of the worker's log. On the supervisor's machine, this is where ``baton
        logs`` looks for it."""
        home = Path(self._spec.home)
        path = (home if home.is_dir() else baton_home()) / self._spec.log
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
