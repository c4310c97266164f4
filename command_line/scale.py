"""``baton scale`` and ``baton drain`` send their command to the supervisor, and show the progress
of the change."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.clock import SystemClock
from baton.config import baton_home
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.core.worker_kinds import list_kinds
from baton.errors import Invalid, NotFound, Unavailable
from baton.pools.base import MAX_POOL, PoolWorker
from baton.pools.control_client import send_control_command
from command_line.status import fetch_members
from command_line.status_line import StatusLine
from orchestrator.cluster_state import ClusterFolder, ClusterState

POLL_SECONDS = 0.25
MAX_PENDING_SECONDS = 60.0
"""How long a worker may be pending, while no other worker starts or stops, before the command gives
up waiting."""


def run_scale(name: str, sizes: list[str], wait: bool) -> None:
    """Resize a local cluster's pools. Raises Invalid for wrong sizes, and Unavailable if a worker
    fails to start."""
    wanted = parse_pool_counts(sizes)
    folder = ClusterFolder(baton_home(), name)
    state = folder.read_running()
    before = send_control_command(folder.control_socket, {"command": "pools"})["sizes"]
    send_control_command(folder.control_socket, {"command": "scale", "pools": wanted})
    changes = [f"{pool} {before.get(pool, 0)} → {count}" for pool, count in wanted.items()]
    if not wait:
        print(", ".join(changes))
        return
    scaling = ScaleProgress(wanted, {pool: before.get(pool, 0) for pool in wanted})
    if _watch_until_done(folder.control_socket, state, scaling.describe_progress):
        print(f"{', '.join(changes)}: done")


def run_drain(name: str, worker: str, wait: bool) -> None:
    """Drain and remove a worker of a local cluster. Raises Invalid for an unknown worker, or for
    the last worker of a pool."""
    folder = ClusterFolder(baton_home(), name)
    state = folder.read_running()
    try:
        send_control_command(folder.control_socket, {"command": "drain", "worker": worker})
    except NotFound as error:
        raise Invalid(str(error)) from error
    if not wait:
        print(f"draining {worker}")
    elif _watch_until_done(
        folder.control_socket, state, DrainProgress(WorkerId(worker)).describe_progress
    ):
        print(f"{worker} is gone")


def parse_pool_counts(texts: list[str]) -> dict[str, int]:
    """Parse texts like ``decode=3`` or ``MODEL/decode=3`` into sizes by the pools' names. Raises
    Invalid for a text of another form, and for a size out of bounds."""
    wanted: dict[str, int] = {}
    for text in texts:
        pool, _, count = text.rpartition("=")
        if not (pool and count.isdecimal() and int(count) <= MAX_POOL):
            raise Invalid(
                f"scale takes {list_kinds('{}=N')} (if the cluster serves several "
                f"models: MODEL/decode=N) with N from 0 to {MAX_POOL}, not {text!r}"
            )
        wanted[pool] = int(count)
    return wanted


class DrainProgress:
    """Describes the progress of a worker that drains."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id

    def describe_progress(self, workers: list[PoolWorker], members: dict[str, Member]) -> str:
        """Return the progress as text; empty once the worker is gone."""
        draining = [worker for worker in workers if worker.id == self._worker_id]
        return ", ".join(_describe_draining(worker, members) for worker in draining)


class ScaleProgress:
    """Describes the progress of pools that are resized from ``before`` to ``wanted``."""

    def __init__(self, wanted: dict[str, int], before: dict[str, int]) -> None:
        self._wanted = wanted
        self._before = before
        self._num_stuck_polls = 0

    def describe_progress(self, workers: list[PoolWorker], members: dict[str, Member]) -> str:
        """Return the progress as text; empty once every worker has started or left. Raises
        Unavailable if a worker fails to start, or stays pending for too long."""
        concerned = [worker for worker in workers if worker.pool in self._wanted]
        self._check_progress(concerned)
        parts = [self._describe_conversions(concerned)]
        parts += [self._describe_pool(pool, concerned, members) for pool in self._wanted]
        return "; ".join(filter(None, parts))

    def _describe_conversions(self, workers: list[PoolWorker]) -> str:
        names = [worker.id for worker in workers if worker.state == "converting"]
        changes = ", ".join(self._describe_resize(pool) for pool in self._wanted)
        verb = "changes" if len(names) == 1 else "change"
        return f"{changes}: {', '.join(names)} {verb} role" if names else ""

    def _describe_resize(self, pool: str) -> str:
        return f"{pool} {self._before[pool]} → {self._wanted[pool]}"

    def _describe_pool(
        self, pool: str, workers: list[PoolWorker], members: dict[str, Member]
    ) -> str:
        own = [worker for worker in workers if worker.pool == pool]
        starting = [worker for worker in own if worker.is_staying and worker.state != "serving"]
        parts = [
            _describe_starting(starting, state) for state in ("starting", "restarting", "pending")
        ]
        parts += [_describe_draining(worker, members) for worker in own if not worker.is_staying]
        text = ", ".join(filter(None, parts))
        return text and f"{self._describe_resize(pool)}: {text}"

    def _check_progress(self, workers: list[PoolWorker]) -> None:
        for worker in workers:
            if worker.state == "failed":
                raise Unavailable(f"{worker.id} failed to start: {worker.message}")
        changing = [worker.state for worker in workers if worker.state != "serving"]
        stuck = bool(changing) and all(state == "pending" for state in changing)
        self._num_stuck_polls = self._num_stuck_polls + 1 if stuck else 0
        if self._num_stuck_polls * POLL_SECONDS > MAX_PENDING_SECONDS:
            worker = next(worker for worker in workers if worker.state == "pending")
            raise Unavailable(
                f"{worker.id} {worker.message}; it will start once it can be scheduled, unless "
                "you scale back"
            )


def _describe_starting(workers: list[PoolWorker], state: str) -> str:
    found = [worker for worker in workers if worker.state == state]
    reason = f" ({found[0].message})" if found and state == "pending" and found[0].message else ""
    return f"{len(found)} {state}{reason}" if found else ""


def _describe_draining(worker: PoolWorker, members: dict[str, Member]) -> str:
    member = members.get(worker.id)
    count = member.load.running + member.load.waiting if member is not None else 0
    requests = f": {count} request{'s' * (count != 1)} left" if count else ""
    return f"draining {worker.id}{requests}"


# -- watching -------------------------------------------------------------------------------------

DescribeProgress = Callable[[list[PoolWorker], dict[str, Member]], str]
"""Describes the progress as text; empty when it is complete."""


def _watch_until_done(socket: Path, state: ClusterState, look: DescribeProgress) -> bool:
    """Show progress until ``look`` returns an empty text. Return False if Ctrl-C interrupts the
    watching, which does not stop the change itself."""
    try:
        asyncio.run(_show_progress(socket, state, look))
    except KeyboardInterrupt:
        print("the change continues in the background: see `baton status`", file=sys.stderr)
        return False
    return True


async def _show_progress(socket: Path, state: ClusterState, look: DescribeProgress) -> None:
    clock, line = SystemClock(), StatusLine()
    began = clock.monotonic()
    try:
        while progress := look(await _workers(socket), await fetch_members(state)):
            line.show(progress, clock.monotonic() - began)
            await clock.sleep(POLL_SECONDS)
    finally:
        line.close()


async def _workers(socket: Path) -> list[PoolWorker]:
    pools = await asyncio.to_thread(send_control_command, socket, {"command": "pools"})
    return [_parse_worker(entry) for entry in pools["workers"]]


def _parse_worker(entry: dict[str, Any]) -> PoolWorker:
    return PoolWorker(**entry | {"role": Role(entry["role"])})
