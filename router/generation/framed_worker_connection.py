"""A worker connection over Baton's framed protocol instead of gRPC, for workers that offer it."""

from baton.core.credentials import ClusterCredentials
from baton.core.kv_transfer import WorkerRef
from baton.errors import BatonError
from baton.rpc.framed.client import FramedClientConnection, open_framed_connection
from baton.rpc.framed.worker_service import WORKER_SERVICE
from baton.rpc.worker_stream import decode_outputs
from router.generation.worker_connection import (
    CONNECT_TIMEOUT_SECONDS,
    MAX_UNSENT_MESSAGES,
    StreamWorkerConnection,
)


class FramedWorkerConnection(StreamWorkerConnection):
    is_framed = True

    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        super().__init__(worker, trust)
        self._connection: FramedClientConnection | None = None
        self._unsent: list[bytes] = []  # messages to send when the connection opens

    async def serve(self) -> BatonError:
        connection = await open_framed_connection(
            self._worker.framed_address,
            WORKER_SERVICE,
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
        """Send a message now, or queue it until the connection is open. If the worker does not read
        from an open connection, the connection breaks by itself."""
        if self._connection is not None:
            self._connection.send_message(message)
        elif len(self._unsent) < MAX_UNSENT_MESSAGES:
            self._unsent.append(message)
        else:
            self.break_connection("the worker does not accept the connection")

    def _receive(self, payload: bytes) -> None:
        self.deliver(decode_outputs(payload))
