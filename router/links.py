"""One link per worker, shared by all requests that it has from this router."""

import asyncio
from typing import Protocol

from baton.core.handoff import WorkerRef
from baton.core.ids import Epoch, RequestId, WorkerId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.core.trust import Trust, trust_of
from baton.rpc.worker_line import WORKER_SERVICE
from router.closed_lines import ClosedLines
from router.grpc_link import GrpcWorkerLink
from router.inbox import Inbox
from router.line_link import LineWorkerLink
from router.stream_link import StreamLink

SHUN_SECONDS = 5.0
"""A worker whose link broke gets nothing new for so long, if others can do it: whoever is gone has
left the registry by then, and whoever stood still has shown that it is back."""

RETIRE_SECONDS = 30.0
"""A stream is the lease of what came over it, also of what its peers still fetch."""


class WorkerLink(Protocol):
    """The way to one life of one worker. No method waits or raises: what goes wrong comes into
    the inboxes, to each that was not forgotten, as Unavailable."""

    @property
    def alive(self) -> bool: ...

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None, inbox: Inbox) -> None:
        """Outputs of (request_id, epoch) go to ``inbox`` until :meth:`forget`."""
        ...

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        """Also forgets. Unknown requests are ignored."""
        ...

    def forget(self, request_id: RequestId, epoch: Epoch) -> None: ...


class Links(Protocol):
    def link(self, worker: WorkerRef) -> WorkerLink:
        """The living link to it, or a new one."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Whether there is a link to it that has not broken."""
        ...

    def shunned(self) -> frozenset[WorkerId]:
        """Whose links broke just now."""
        ...


class WorkerLinks:
    """Links by address and generation: lines to workers that have one which opens, else gRPC. They
    live while :meth:`run` does."""

    def __init__(self, trust: Trust | str | None = None) -> None:
        self._trust = trust_of(trust)
        self._links: dict[tuple[str, int], StreamLink] = {}
        self._broke_at: dict[WorkerId, float] = {}
        self._closed_lines = ClosedLines(WORKER_SERVICE, self._trust)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    def link(self, worker: WorkerRef) -> StreamLink:
        assert self._tasks is not None, "only while run() runs"
        key = (worker.address, int(worker.generation))
        known = self._links.get(key)
        if known is not None and known.alive:
            if known.is_line or not self._has_line(worker):
                return known
            _retire(known)
        link = self._links[key] = self._new_link(worker)
        link.task = self._tasks.create_task(self._run(worker, link))
        return link

    async def _run(self, worker: WorkerRef, link: StreamLink) -> None:
        try:
            await link.run()
        finally:
            self._drop(worker, link)

    def _new_link(self, worker: WorkerRef) -> StreamLink:
        kind = LineWorkerLink if self._has_line(worker) else GrpcWorkerLink
        return kind(worker, self._trust)

    def _has_line(self, worker: WorkerRef) -> bool:
        return bool(worker.line) and worker.line not in self._closed_lines

    def is_alive(self, worker: WorkerRef) -> bool:
        known = self._links.get((worker.address, int(worker.generation)))
        return known is not None and known.alive

    def shunned(self) -> frozenset[WorkerId]:
        now = asyncio.get_running_loop().time()
        self._broke_at = {
            worker: at for worker, at in self._broke_at.items() if now < at + SHUN_SECONDS
        }
        return frozenset(self._broke_at)

    def _drop(self, worker: WorkerRef, link: StreamLink) -> None:
        if link.retired:
            return
        if link.is_line and not link.reached and self._tasks is not None:
            self._closed_lines.add(worker.line, self._tasks)
        self._broke_at[worker.id] = asyncio.get_running_loop().time()
        key = (worker.address, int(worker.generation))
        if self._links.get(key) is link:
            del self._links[key]


def _retire(link: StreamLink, was_idle: bool = False) -> None:
    """Ends a link that another has replaced, once nothing has come over it for a while."""
    if link.idle and was_idle:
        link.retire()
    elif link.alive:
        asyncio.get_running_loop().call_later(RETIRE_SECONDS, _retire, link, link.idle)
