"""The common base class of worker connections, which is independent of the transport."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import structlog

from baton.core.credentials import ClusterCredentials
from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Unavailable, Unresponsive
from baton.rpc.worker_stream import SubmitEncoder, encode_cancel
from router.generation.output_queue import OutputDeliveryError, OutputReceiver

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0

MAX_UNSENT_MESSAGES = 16_384
"""The maximum number of messages that wait to be sent to a worker. A worker that leaves so many
unread is considered gone."""

SUBMIT_ENCODER = SubmitEncoder()


class NotConnected(Unavailable):
    """The connection was never established, so the worker never got the request, and the request
    can't be the cause of the failure."""


class WorkerLost(Unavailable):
    """The worker's stream ended while requests ran on it: the worker crashed (perhaps because of a
    request), was stopped, or the connection was cut."""


class StreamWorkerConnection(ABC):
    """Base class of the implementations of
    :class:`router.generation.worker_connection_pool.WorkerConnection`.

    :meth:`run` connects and serves until the stream breaks. After that the connection is dead, and
    the pool opens a new one when it is needed.
    """

    is_framed = False

    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        self._worker = worker
        self._credentials = trust
        self._receivers: dict[tuple[str, int], OutputReceiver] = {}
        self.task: asyncio.Task[None] | None = None
        self.was_connected = False
        self.is_alive = True
        self.is_retired = False
        self.progressed_at = 0.0

    @abstractmethod
    async def serve(self) -> BatonError:
        """Connect, set ``was_connected``, and serve until the stream ends. Return or raise the
        error that ended the stream."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Send a ``RouterMessage``, or queue it until it can be sent. Call this only while
        ``is_alive`` is True."""

    def submit(
        self, spec: RequestSpec, task: Task, source: WorkerRef | None, receive: OutputReceiver
    ) -> None:
        if not self.is_alive:
            worker_id = self._worker.id
            receive(worker_id, Unavailable(f"the connection to worker {worker_id} is broken"))
            return
        self._receivers[spec.request_id, spec.epoch] = receive
        self.send(SUBMIT_ENCODER.encode(spec, task, source))

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self.stop_delivery(request_id, epoch)
        if self.is_alive:
            self.send(encode_cancel(request_id, epoch))

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    def stop_delivery(self, request_id: RequestId, epoch: Epoch) -> None:
        self._receivers.pop((request_id, epoch), None)

    async def run(self) -> None:
        """Connect, and serve until the stream ends for any reason."""
        failure: BatonError = Unavailable("the stream ended")
        try:
            failure = await self.serve()
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("worker_connection_crashed", worker=self._worker.id)
            failure = BatonError("internal error")
        finally:
            is_lost = isinstance(failure, Unavailable) and not isinstance(failure, Unresponsive)
            self._on_break(str(failure), WorkerLost if is_lost else Unavailable)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Give each output to the receiver of its request. If a receiver raises an exception (a
        bug), only that request ends, not the stream or the other requests. If there are no outputs,
        the worker has announced progress."""
        if not outputs:
            self.progressed_at = asyncio.get_running_loop().time()
        worker_id = self._worker.id
        for output in outputs:
            receive = self._receivers.get((output.request_id, output.epoch))
            if receive is None:
                continue
            try:
                receive(worker_id, output)
            except Exception:
                log.exception("delivery_crashed", worker=worker_id, request_id=output.request_id)
                receive(worker_id, OutputDeliveryError("internal error"))

    def break_connection(self, failure: str) -> None:
        """Break the connection now, for the reason ``failure``: all requests on it get an error."""
        self._on_break(failure)
        if self.task is not None:
            self.task.cancel()

    def retire(self) -> None:
        """Close this connection after another one has replaced it. Call it only when no request
        uses this connection any more."""
        self.is_alive, self.is_retired = False, True
        if self.task is not None:
            self.task.cancel()

    def _on_break(self, failure: str, kind: type[Unavailable] = Unavailable) -> None:
        """Mark the connection as dead and report an error to all requests on it: ``kind`` if the
        connection had been established, else NotConnected."""
        if not self.is_alive:
            return
        self.is_alive = False
        log.info(
            "worker_connection_lost",
            worker=self._worker.id,
            error=failure,
            requests=len(self._receivers),
        )
        kind = kind if self.was_connected else NotConnected
        receivers, self._receivers = self._receivers, {}
        for receive in receivers.values():
            receive(self._worker.id, kind(f"lost worker {self._worker.id}: {failure}"))
