"""One connection per worker, shared by all of this router's requests on that worker."""

import asyncio
from typing import Protocol

from baton.core.credentials import ClusterCredentials, to_credentials
from baton.core.ids import Epoch, RequestId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestSpec
from baton.core.task import Task
from router.generation.output_queue import OutputReceiver
from router.generation.worker_connection import FramedWorkerConnection

AVOID_SECONDS = 5.0
"""After a worker's connection broke, the worker gets no new requests for this long if other workers
can take them. By then, a dead worker has left the registry."""


class WorkerConnection(Protocol):
    """A connection to one incarnation of one worker. No method waits or raises: if the connection
    breaks, the receivers of its requests get Unavailable, except after :meth:`stop_delivery`."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def progressed_at(self) -> float:
        """When the worker last announced that it has made progress with any request, on the event
        loop's clock."""
        ...

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, receive: OutputReceiver
    ) -> None:
        """Send a request. Its outputs, identified by request id and epoch, go to ``receive`` until
        :meth:`stop_delivery` is called."""
        ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Cancel the request on the worker and stop delivering its outputs. Unknown requests are
        ignored."""
        ...

    def stop_delivery(self, request_id: RequestId, epoch: Epoch) -> None:
        """Stop delivering the request's outputs. Unknown requests are ignored."""
        ...


class WorkerConnections(Protocol):
    def connect(self, worker: WorkerRef) -> WorkerConnection:
        """Return the live connection to a worker, or open a new one."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Whether there is a connection to the worker that has not broken."""
        ...

    def recently_broken(self) -> frozenset[WorkerId]:
        """Return the workers whose connections broke recently."""
        ...


class WorkerConnectionPool:
    """Keeps one connection per worker address and incarnation. Connections can be opened while
    :meth:`run` runs, and are closed when it ends."""

    def __init__(self, credentials: ClusterCredentials | str | None = None) -> None:
        self._credentials = to_credentials(credentials)
        self._connections: dict[tuple[str, int], FramedWorkerConnection] = {}
        self._broke_at: dict[WorkerId, float] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the connections open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    def connect(self, worker: WorkerRef) -> FramedWorkerConnection:
        assert self._tasks is not None, "connect() may be called only while run() runs"
        key = (worker.address, int(worker.generation))
        existing = self._connections.get(key)
        if existing is not None and existing.is_alive:
            return existing
        connection = FramedWorkerConnection(worker, self._credentials)
        self._connections[key] = connection
        connection.task = self._tasks.create_task(self._run(worker, connection))
        return connection

    async def _run(self, worker: WorkerRef, connection: FramedWorkerConnection) -> None:
        try:
            await connection.run()
        finally:
            self._remove(worker, connection)

    def is_alive(self, worker: WorkerRef) -> bool:
        existing = self._connections.get((worker.address, int(worker.generation)))
        return existing is not None and existing.is_alive

    def num_requests(self, worker: WorkerRef) -> int:
        """Return how many requests of this router the worker has now."""
        existing = self._connections.get((worker.address, int(worker.generation)))
        return 0 if existing is None else existing.num_requests

    def recently_broken(self) -> frozenset[WorkerId]:
        now = asyncio.get_running_loop().time()
        self._broke_at = {
            worker: at for worker, at in self._broke_at.items() if now < at + AVOID_SECONDS
        }
        return frozenset(self._broke_at)

    def _remove(self, worker: WorkerRef, connection: FramedWorkerConnection) -> None:
        self._broke_at[worker.id] = asyncio.get_running_loop().time()
        key = (worker.address, int(worker.generation))
        if self._connections.get(key) is connection:
            del self._connections[key]
