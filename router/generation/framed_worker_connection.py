"""A link over a line, without gRPC: to workers that have one."""

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
    is_line = True

    def __init__(self, worker: WorkerRef, trust: ClusterCredentials) -> None:
        super().__init__(worker, trust)
        self._line: FramedClientConnection | None = None
        self._early: list[bytes] = []  # what is to go out once there is a line

    async def serve(self) -> BatonError:
        line = await open_framed_connection(
            self._worker.line, WORKER_SERVICE, self._trust, self._receive, CONNECT_TIMEOUT_SECONDS
        )
        self.reached, self._line = True, line
        try:
            for message in self._early:
                line.send_message(message)
            self._early.clear()
            return await line.ended()
        finally:
            line.close()

    def send(self, message: bytes) -> None:
        """A line that is not read from breaks by itself."""
        if self._line is not None:
            self._line.send_message(message)
        elif len(self._early) < MAX_UNSENT_MESSAGES:
            self._early.append(message)
        else:
            self.give_up("it does not answer")

    def _receive(self, payload: bytes) -> None:
        for output in decode_outputs(payload):
            self.deliver(output)
