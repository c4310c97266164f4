"""One stream per worker, shared by all requests that it has from this router."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio
import structlog

from baton.core.handoff import WorkerRef
from baton.core.ids import Epoch, RequestId, WorkerId
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Unavailable
from baton.rpc.channel import open_channel
from baton.rpc.router_stream import RouterMessage, cancel_message, converse, submit_message
from router.inbox import Inbox

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 2.0

SHUN_SECONDS = 5.0
"""A worker whose link broke gets nothing new for so long, if others can do it: whoever is gone has
left the registry by then, and whoever stood still has shown that it is back."""

MAX_UNSENT = 16_384
"""Messages. A worker that reads nothing for so long is as good as gone."""


class NotReached(Unavailable):
    """No connection came about: what was to be sent was not, and harmed nobody."""


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


class GrpcWorkerLink:
    """:meth:`run` connects and serves until the stream breaks; then the link is dead."""

    def __init__(self, worker: WorkerRef, secret: str | None) -> None:
        self._worker = worker
        self._secret = secret
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._unsent: asyncio.Queue[RouterMessage] = asyncio.Queue(MAX_UNSENT)
        self.task: asyncio.Task[None] | None = None
        self._reached = False
        self.alive = True

    @property
    def idle(self) -> bool:
        return not self._inboxes

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None, inbox: Inbox) -> None:
        if not self.alive:
            inbox.put(self._worker.id, Unavailable(f"worker {self._worker.id} is gone"))
            return
        self._inboxes[spec.request_id, spec.epoch] = inbox
        self._send(submit_message(spec, task, source))

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.forget(request_id, epoch)
        if self.alive:
            self._send(cancel_message(request_id, epoch))

    def forget(self, request_id: RequestId, epoch: Epoch) -> None:
        self._inboxes.pop((request_id, epoch), None)

    async def run(self) -> None:
        """Returns when the stream is over, whatever ended it."""
        failure = "the stream ended"
        try:
            async with open_channel(self._worker.address, self._secret) as channel:
                await _connected(channel)
                self._reached = True
                await converse(channel, self._messages(), self._deliver)
        except BatonError as error:
            failure = str(error)
        finally:
            self._break(failure)

    def _send(self, message: RouterMessage) -> None:
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self._break("it does not read")
            if self.task is not None:
                self.task.cancel()

    async def _messages(self) -> AsyncIterator[RouterMessage]:
        while True:
            yield await self._unsent.get()

    def _deliver(self, output: RequestOutput) -> None:
        inbox = self._inboxes.get((output.request_id, output.epoch))
        if inbox is not None:
            inbox.put(self._worker.id, output)

    def _break(self, failure: str) -> None:
        self.alive = False
        log.info("link_broke", worker=self._worker.id, error=failure, requests=len(self._inboxes))
        kind = Unavailable if self._reached else NotReached
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(self._worker.id, kind(f"lost worker {self._worker.id}: {failure}"))


class GrpcLinks:
    """Links by address and generation. They live while :meth:`run` does."""

    def __init__(self, secret: str | None = None) -> None:
        self._secret = secret
        self._links: dict[tuple[str, int], GrpcWorkerLink] = {}
        self._broke_at: dict[WorkerId, float] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.get_running_loop().create_future()

    def link(self, worker: WorkerRef) -> GrpcWorkerLink:
        assert self._tasks is not None, "run() comes first"
        key = (worker.address, int(worker.generation))
        known = self._links.get(key)
        if known is not None and known.alive:
            return known
        link = self._links[key] = GrpcWorkerLink(worker, self._secret)
        link.task = self._tasks.create_task(link.run())
        link.task.add_done_callback(lambda _: self._drop(worker, link))
        return link

    def is_alive(self, worker: WorkerRef) -> bool:
        known = self._links.get((worker.address, int(worker.generation)))
        return known is not None and known.alive

    def shunned(self) -> frozenset[WorkerId]:
        now = asyncio.get_running_loop().time()
        self._broke_at = {
            worker: at for worker, at in self._broke_at.items() if now < at + SHUN_SECONDS
        }
        return frozenset(self._broke_at)

    def _drop(self, worker: WorkerRef, link: GrpcWorkerLink) -> None:
        self._broke_at[worker.id] = asyncio.get_running_loop().time()
        key = (worker.address, int(worker.generation))
        if self._links.get(key) is link:
            del self._links[key]


async def _connected(channel: grpc.aio.Channel) -> None:
    """Raises Unavailable at the first failure, unlike ``channel_ready``, which tries on."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise Unavailable("it does not accept connections")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise Unavailable(f"no connection within {CONNECT_SECONDS:g} s") from error
