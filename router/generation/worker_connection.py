"""A router's connection to a worker, over which it sends requests and receives outputs."""

import asyncio
from collections.abc import Sequence

import structlog

from baton.core.credentials import ClusterCredentials
from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import BatonError, Unavailable, Unresponsive
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.service import WORKER
from baton.rpc.worker_stream import SubmitEncoder, decode_outputs, encode_cancel
from router.generation.output_queue import OutputDeliveryError, OutputReceiver
from router.limits import MAX_UNSENT_MESSAGES

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0

SUBMIT_ENCODER = SubmitEncoder()


class NotConnected(Unavailable):
    """The connection was never established, so the worker never got the request, and the request
    can't be the cause of the failure."""


class WorkerLost(Unavailable):
    """The worker's stream ended while requests ran on it: the worker crashed (perhaps because of a
    request), was stopped, or the connection was cut."""


class FramedWorkerConnection:
    """Implements :class:`router.generation.worker_connection_pool.WorkerConnection`.

    :meth:`run` connects and serves until the stream breaks. After that the connection is dead, and
    the pool opens a new one when it is needed.
    """

    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        self._worker = worker
        self._credentials = trust
        self._receivers: dict[tuple[str, int], OutputReceiver] = {}
        self.task: asyncio.Task[None] | None = None
        self.was_connected = False
        self.is_alive = True
        self.progressed_at = 0.0
        self._connection: FramedClientConnection | None = None
        self._unsent: list[bytes] = []  # messages to send when the connection opens

    async def serve(self) -> BatonError:
        """Connect, and serve until the stream ends. Return or raise the error that ended it."""
        connection = await open_framed_connection(
            self._worker.framed_address,
            WORKER.name,
            self._credentials,
            self._receive,
            CONNECT_TIMEOUT_SECONDS,
        )
        self.was_connected, self._connection = True, connection
        try:
            for message in self._unsent:
                connection.send_message(message)
            self._unsent.clear()
            return await connection.wait_until_ended()
        finally:
            connection.close()

    def send(self, message: bytes) -> None:
        """Send a ``RouterMessage`` now, or queue it until the connection is open. Call this only
        while ``is_alive`` is True. If the worker does not read from an open connection, the
        connection breaks by itself."""
        if self._connection is not None:
            self._connection.send_message(message)
        elif len(self._unsent) < MAX_UNSENT_MESSAGES:
            self._unsent.append(message)
        else:
            self.break_connection("the worker does not accept the connection")

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

    def _receive(self, payload: bytes) -> None:
        self.deliver(decode_outputs(payload))

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
