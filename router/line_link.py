"""A link over a line, without gRPC: to workers that have one."""

from baton.core.handoff import WorkerRef
from baton.core.trust import Trust
from baton.errors import BatonError
from baton.rpc.line_client import ClientLine, open_line
from baton.rpc.router_stream import outputs_of
from baton.rpc.worker_line import WORKER_SERVICE
from router.stream_link import CONNECT_SECONDS, MAX_UNSENT, StreamLink


class LineWorkerLink(StreamLink):
    is_line = True

    def __init__(self, worker: WorkerRef, trust: Trust) -> None:
        super().__init__(worker, trust)
        self._line: ClientLine | None = None
        self._early: list[bytes] = []  # what is to go out once there is a line

    async def serve(self) -> BatonError:
        line = await open_line(
            self._worker.line, WORKER_SERVICE, self._trust, self._receive, CONNECT_SECONDS
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
        elif len(self._early) < MAX_UNSENT:
            self._early.append(message)
        else:
            self.give_up("it does not answer")

    def _receive(self, payload: bytes) -> None:
        for output in outputs_of(payload):
            self.deliver(output)
