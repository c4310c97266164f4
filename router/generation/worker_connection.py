"""What links to workers have in common, however their messages travel."""

import asyncio
from abc import ABC, abstractmethod

import structlog

from baton.core.credentials import ClusterCredentials
from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Unavailable, Unresponsive
from baton.rpc.worker_stream import SubmitEncoder, encode_cancel
from router.generation.output_queue import OutputDeliveryError, OutputQueue

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0

MAX_UNSENT_MESSAGES = 16_384
"""Messages, before there is a connection, or while the worker does not read: one that reads nothing
for so long is as good as gone."""

ENCODER = SubmitEncoder()


class NotConnected(Unavailable):
    """No connection came about: what was to be sent was not, and harmed nobody."""


class WorkerLost(Unavailable):
    """Its stream ended with requests on it: it died of one of them or of something else, or was
    stopped, or the connection was cut."""


class StreamWorkerConnection(ABC):
    """A :class:`router.generation.worker_connection_pool.WorkerConnection`. :meth:`run` connects
    and serves until the stream breaks; then the link is dead."""

    is_line = False

    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        self._worker = worker
        self._trust = trust
        self._inboxes: dict[tuple[str, int], OutputQueue] = {}
        self.task: asyncio.Task[None] | None = None
        self.reached = False
        self.alive = True
        self.retired = False

    @abstractmethod
    async def serve(self) -> BatonError:
        """Connects, sets ``reached``, and serves until the stream is over. Why it is, is returned
        or raised."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """A ``RouterMessage``; sooner or later. While the link is alive."""

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, inbox: OutputQueue
    ) -> None:
        if not self.alive:
            inbox.put(self._worker.id, Unavailable(f"worker {self._worker.id} is gone"))
            return
        self._inboxes[spec.request_id, spec.epoch] = inbox
        self.send(ENCODER.submit(spec, task, source))

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.forget(request_id, epoch)
        if self.alive:
            self.send(encode_cancel(request_id, epoch))

    @property
    def idle(self) -> bool:
        return not self._inboxes

    def forget(self, request_id: RequestId, epoch: Epoch) -> None:
        self._inboxes.pop((request_id, epoch), None)

    async def run(self) -> None:
        """Returns when the stream is over, whatever ended it."""
        failure: BatonError = Unavailable("the stream ended")
        try:
            failure = await self.serve()
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("link_crashed", worker=self._worker.id)
            failure = BatonError("internal error")
        finally:
            is_lost = isinstance(failure, Unavailable) and not isinstance(failure, Unresponsive)
            self.on_break(str(failure), WorkerLost if is_lost else Unavailable)

    def deliver(self, output: RequestOutput) -> None:
        """An exception in what becomes of it (a bug of ours) ends that request, and neither the
        stream nor the others on it."""
        inbox = self._inboxes.get((output.request_id, output.epoch))
        if inbox is None:
            return
        try:
            inbox.put(self._worker.id, output)
        except Exception:
            log.exception("delivery_crashed", worker=self._worker.id, request_id=output.request_id)
            inbox.put(self._worker.id, OutputDeliveryError("internal error"))

    def give_up(self, failure: str) -> None:
        """Breaks it now."""
        self.on_break(failure)
        if self.task is not None:
            self.task.cancel()

    def retire(self) -> None:
        """Ends it: nothing is left that came over it, and another has taken its place."""
        self.alive, self.retired = False, True
        if self.task is not None:
            self.task.cancel()

    def on_break(self, failure: str, kind: type[Unavailable] = Unavailable) -> None:
        """Tells all requests, as an error of ``kind`` if the worker had been reached."""
        if not self.alive:
            return
        self.alive = False
        log.info("link_broke", worker=self._worker.id, error=failure, requests=len(self._inboxes))
        kind = kind if self.reached else NotConnected
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(self._worker.id, kind(f"lost worker {self._worker.id}: {failure}"))
