"""``baton scale`` and ``baton drain``: what they ask for, and how it goes on."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.clock import SystemClock
from baton.config import baton_home
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Unavailable
from baton.pools.base import PoolWorker, parse_pool_sizes
from baton.pools.control_client import send_control_command
from command_line.status import members_of
from orchestrator.cluster_state import ClusterFolder, ClusterState

LOOK_SECONDS = 0.25
PENDING_SECONDS = 60.0
"""That a worker may wait for a machine while nothing else is on its way, before nobody watches any
more."""


def run_scale(name: str, sizes: list[str], wait: bool) -> None:
    """Raises Invalid; Unavailable when a worker fails to start."""
    wanted = parse_role_pool_sizes(sizes)
    folder = ClusterFolder(baton_home(), name)
    state = folder.running()
    before = send_control_command(folder.socket, {"command": "pools"})["sizes"]
    send_control_command(
        folder.socket, {"command": "scale", "pools": {r.value: n for r, n in wanted.items()}}
    )
    changes = [f"{role.value} {before.get(role, 0)} → {count}" for role, count in wanted.items()]
    if not wait:
        print(", ".join(changes))
        return
    scaling = ScaleWatch(wanted, {role: before.get(role, 0) for role in wanted})
    if _watch(folder.socket, state, scaling.look):
        print(f"{', '.join(changes)}: done")


def run_drain(name: str, worker: str, wait: bool) -> None:
    """Raises Invalid for a worker that there is not, or that is the last of its pool."""
    folder = ClusterFolder(baton_home(), name)
    state = folder.running()
    try:
        send_control_command(folder.socket, {"command": "drain", "worker": worker})
    except NotFound as error:
        raise Invalid(str(error)) from error
    if not wait:
        print(f"draining {worker}")
    elif _watch(folder.socket, state, DrainWatch(WorkerId(worker)).look):
        print(f"{worker} is gone")


def parse_role_pool_sizes(texts: list[str]) -> dict[Role, int]:
    """Raises Invalid."""
    wanted: dict[str, int] = {}
    for text in texts:
        role, _, count = text.partition("=")
        if not (role and count.isdecimal()):
            raise Invalid(f"scale takes prefill=N and decode=N, not {text!r}")
        wanted[role] = int(count)
    return parse_pool_sizes(wanted)


class DrainWatch:
    """What there is to say of a worker that leaves."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id

    def look(self, workers: list[PoolWorker], members: dict[str, Member]) -> str:
        """Empty once it has gone."""
        leaving = [worker for worker in workers if worker.id == self._worker_id]
        return ", ".join(_leaving(worker, members) for worker in leaving)


class ScaleWatch:
    """What there is to say of pools that change from ``before`` to ``wanted``."""

    def __init__(self, wanted: dict[Role, int], before: dict[Role, int]) -> None:
        self._wanted = wanted
        self._before = before
        self._num_stuck = 0

    def look(self, workers: list[PoolWorker], members: dict[str, Member]) -> str:
        """Empty once all have come and gone. Raises Unavailable for one that does not come."""
        ours = [worker for worker in workers if worker.role in self._wanted]
        self._check(ours)
        told = [self._converting(ours)]
        told += [self._pool(role, ours, members) for role in self._wanted]
        return "; ".join(filter(None, told))

    def _converting(self, workers: list[PoolWorker]) -> str:
        names = [worker.id for worker in workers if worker.state == "converting"]
        changes = ", ".join(self._change(role) for role in self._wanted)
        verb = "changes" if len(names) == 1 else "change"
        return f"{changes}: {', '.join(names)} {verb} role" if names else ""

    def _change(self, role: Role) -> str:
        return f"{role.value} {self._before[role]} → {self._wanted[role]}"

    def _pool(self, role: Role, workers: list[PoolWorker], members: dict[str, Member]) -> str:
        pool = [worker for worker in workers if worker.role == role]
        coming = [worker for worker in pool if worker.stays and worker.state != "serving"]
        parts = [_coming(coming, state) for state in ("starting", "restarting", "pending")]
        parts += [_leaving(worker, members) for worker in pool if not worker.stays]
        told = ", ".join(filter(None, parts))
        return told and f"{self._change(role)}: {told}"

    def _check(self, workers: list[PoolWorker]) -> None:
        for worker in workers:
            if worker.state == "failed":
                raise Unavailable(f"{worker.id} failed to start: {worker.message}")
        moving = [worker.state for worker in workers if worker.state != "serving"]
        stuck = bool(moving) and all(state == "pending" for state in moving)
        self._num_stuck = self._num_stuck + 1 if stuck else 0
        if self._num_stuck * LOOK_SECONDS > PENDING_SECONDS:
            worker = next(worker for worker in workers if worker.state == "pending")
            raise Unavailable(
                f"{worker.id} {worker.message}; it starts when there is one, unless you scale back"
            )


def _coming(coming: list[PoolWorker], state: str) -> str:
    those = [worker for worker in coming if worker.state == state]
    why = f" ({those[0].message})" if those and state == "pending" and those[0].message else ""
    return f"{len(those)} {state}{why}" if those else ""


def _leaving(worker: PoolWorker, members: dict[str, Member]) -> str:
    member = members.get(worker.id)
    left = member.load.running + member.load.waiting if member is not None else 0
    return f"draining {worker.id}" + (f": {left} request{'s' * (left != 1)} left" if left else "")


# -- watching -------------------------------------------------------------------------------------

Look = Callable[[list[PoolWorker], dict[str, Member]], str]


def _watch(socket: Path, state: ClusterState, look: Look) -> bool:
    """Tells until there is nothing more to tell; False when interrupted: what goes on goes on."""
    try:
        asyncio.run(_tell_all(socket, state, look))
    except KeyboardInterrupt:
        print("it goes on without being watched: `baton status`", file=sys.stderr)
        return False
    return True


async def _tell_all(socket: Path, state: ClusterState, look: Look) -> None:
    clock, line = SystemClock(), _StatusLine()
    began = clock.monotonic()
    try:
        while told := look(await _workers(socket), await members_of(state)):
            line.show(told, clock.monotonic() - began)
            await clock.sleep(LOOK_SECONDS)
    finally:
        line.close()


async def _workers(socket: Path) -> list[PoolWorker]:
    answer = await asyncio.to_thread(send_control_command, socket, {"command": "pools"})
    return [_worker(entry) for entry in answer["workers"]]


def _worker(entry: dict[str, Any]) -> PoolWorker:
    return PoolWorker(**entry | {"role": Role(entry["role"])})


class _StatusLine:
    """One line that changes on a terminal; elsewhere one for each that says something new."""

    def __init__(self) -> None:
        self._console = Console()
        self._status = self._console.status("")
        self._last = ""
        if self._console.is_terminal:
            self._status.start()

    def show(self, told: str, seconds: float) -> None:
        if self._console.is_terminal:
            self._status.update(f"{told}, {seconds:.0f} s")
        elif told != self._last:
            print(f"{told}, {seconds:.0f} s", flush=True)
        self._last = told

    def close(self) -> None:
        self._status.stop()
