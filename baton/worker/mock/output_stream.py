"""A router's stream, seen from a mock worker: outputs wait in their encoded form."""

import asyncio
from collections.abc import Callable

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import Overloaded
from baton.rpc.frames import MAX_MESSAGE_BYTES
from baton.rpc.output_encoder import encode_output

MAX_UNREAD_BYTES = MAX_MESSAGE_BYTES // 4
"""Some 80,000 tokens; a router that has left so much unread is gone or hopelessly behind."""

Submit = Callable[["MockStream", RequestSpec, Task, WorkerRef | None], None]
CancelRequest = Callable[[RequestId, Epoch], None]
NextStep = Callable[["MockStream"], bytes]
"""The next step of the answers that run for a stream; empty when there are none."""


class MockStream:
    """With ``pull``, there is a step whenever the router has taken the one before."""

    def __init__(
        self,
        submit: Submit,
        cancel: CancelRequest,
        on_close: Callable[["MockStream"], None],
        pull: NextStep | None,
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._on_close = on_close
        self._pull = pull
        self._unread: list[bytes] = []
        self._num_bytes = 0
        self._ready = asyncio.Event()
        self.closed = False

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        self._submit(self, spec, task, source)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self._cancel(request_id, epoch)

    def refuse(self, output: RequestOutput) -> None:
        """Tells the end of a request that could not be taken."""
        self.put(encode_output(output))

    def put(self, message: bytes) -> None:
        """Dropped once closed; a router that leaves too much unread is closed."""
        if self.closed:
            return
        self._unread.append(message)
        self._num_bytes += len(message)
        self._ready.set()
        if self._num_bytes > MAX_UNREAD_BYTES:
            self.close()

    def wake(self) -> None:
        """There is something to pull."""
        self._ready.set()

    async def message(self) -> bytes:
        """All that is there, as one message."""
        while True:
            await self._ready.wait()
            if self.closed:
                raise Overloaded("the router left too many outputs unread")
            step = self._pull(self) if self._pull is not None else b""
            if not step:
                self._ready.clear()
            if step or self._unread:
                message = b"".join([*self._unread, step])
                self._unread.clear()
                self._num_bytes = 0
                return message

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unread.clear()
            self._ready.set()
            self._on_close(self)
