"""One link per worker, shared by all requests that it has from this router."""

import asyncio
from typing import Protocol

from baton.core.credentials import ClusterCredentials, as_credentials
from baton.core.ids import Epoch, RequestId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.rpc.framed.worker_service import WORKER_SERVICE
from router.generation.framed_worker_connection import FramedWorkerConnection
from router.generation.grpc_worker_connection import GrpcWorkerConnection
from router.generation.output_queue import OutputQueue
from router.generation.unreachable_addresses import UnreachableAddresses
from router.generation.worker_connection import StreamWorkerConnection

AVOID_SECONDS = 5.0
"""A worker whose link broke gets nothing new for so long, if others can do it: whoever is gone has
left the registry by then, and whoever stood still has shown that it is back."""

REPLACED_CONNECTION_GRACE_SECONDS = 30.0
"""A stream is the lease of what came over it, also of what its peers still fetch."""


class WorkerConnection(Protocol):
    """The way to one life of one worker. No method waits or raises: what goes wrong comes into
    the inboxes, to each that was not forgotten, as Unavailable."""

    @property
    def alive(self) -> bool: ...

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, inbox: OutputQueue
    ) -> None:
        """Outputs of (request_id, epoch) go to ``inbox`` until :meth:`forget`."""
        ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Also forgets. Unknown requests are ignored."""
        ...

    def forget(self, request_id: RequestId, epoch: Epoch) -> None: ...


class WorkerConnections(Protocol):
    def link(self, worker: WorkerRef) -> WorkerConnection:
        """The living link to it, or a new one."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Whether there is a link to it that has not broken."""
        ...

    def shunned(self) -> frozenset[WorkerId]:
        """Whose links broke just now."""
        ...


class WorkerConnectionPool:
    """Links by address and generation: lines to workers that have one which opens, else gRPC. They
    live while :meth:`run` does."""

    def __init__(self, trust: ClusterCredentials | str | None = None) -> None:
        self._trust = as_credentials(trust)
        self._links: dict[tuple[str, int], StreamWorkerConnection] = {}
        self._broke_at: dict[WorkerId, float] = {}
        self._closed_lines = UnreachableAddresses(WORKER_SERVICE, self._trust)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    def link(self, worker: WorkerRef) -> StreamWorkerConnection:
        assert self._tasks is not None, "only while run() runs"
        key = (worker.address, int(worker.generation))
        known = self._links.get(key)
        if known is not None and known.alive:
            if known.is_line or not self._has_line(worker):
                return known
            _close_when_idle(known)
        link = self._links[key] = self._new_link(worker)
        link.task = self._tasks.create_task(self._run(worker, link))
        return link

    async def _run(self, worker: WorkerRef, link: StreamWorkerConnection) -> None:
        try:
            await link.run()
        finally:
            self._drop(worker, link)

    def _new_link(self, worker: WorkerRef) -> StreamWorkerConnection:
        kind = FramedWorkerConnection if self._has_line(worker) else GrpcWorkerConnection
        return kind(worker, self._trust)

    def _has_line(self, worker: WorkerRef) -> bool:
        return bool(worker.line) and worker.line not in self._closed_lines

    def is_alive(self, worker: WorkerRef) -> bool:
        known = self._links.get((worker.address, int(worker.generation)))
        return known is not None and known.alive

    def shunned(self) -> frozenset[WorkerId]:
        now = asyncio.get_running_loop().time()
        self._broke_at = {
            worker: at for worker, at in self._broke_at.items() if now < at + AVOID_SECONDS
        }
        return frozenset(self._broke_at)

    def _drop(self, worker: WorkerRef, link: StreamWorkerConnection) -> None:
        if link.retired:
            return
        if link.is_line and not link.reached and self._tasks is not None:
            self._closed_lines.add(worker.line, self._tasks)
        self._broke_at[worker.id] = asyncio.get_running_loop().time()
        key = (worker.address, int(worker.generation))
        if self._links.get(key) is link:
            del self._links[key]


def _close_when_idle(link: StreamWorkerConnection, was_idle: bool = False) -> None:
    """Ends a link that another has replaced, once nothing has come over it for a while."""
    if link.idle and was_idle:
        link.retire()
    elif link.alive:
        asyncio.get_running_loop().call_later(
            REPLACED_CONNECTION_GRACE_SECONDS, _close_when_idle, link, link.idle
        )
