"""The mock worker's side of a router's stream. Outputs are queued in encoded form."""

import asyncio
from collections.abc import Callable

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import Overloaded
from baton.rpc.output_encoder import encode_output
from baton.worker.limits import MAX_UNREAD_BYTES

Submit = Callable[["MockStream", RequestSpec, Task, WorkerRef | None], None]
CancelRequest = Callable[[RequestId, Epoch], None]
NextStep = Callable[["MockStream"], bytes]
"""Runs the next step of a stream's answers; returns an empty message if there are none."""


class MockStream:
    """A mock worker's side of a router's stream. If ``next_step`` is given, it is called to run the
    next step whenever the router has read the previous step's outputs."""

    def __init__(
        self,
        submit: Submit,
        cancel: CancelRequest,
        on_close: Callable[["MockStream"], None],
        next_step: NextStep | None,
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._on_close = on_close
        self._next_step = next_step
        self._unread: list[bytes] = []
        self._num_bytes = 0
        self._has_progress = False
        self._ready = asyncio.Event()
        self.closed = False

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        self._submit(self, spec, task, source)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self._cancel(request_id, epoch)

    def refuse(self, output: RequestOutput) -> None:
        """Send the final output of a request that could not be accepted."""
        self.put(encode_output(output))

    def put(self, message: bytes) -> None:
        """Queue a message, or drop it if the stream is closed. Close the stream if too much
        output is unread."""
        if self.closed:
            return
        self._unread.append(message)
        self._num_bytes += len(message)
        self._ready.set()
        if self._num_bytes > MAX_UNREAD_BYTES:
            self.close()

    def wake(self) -> None:
        """Wake the task that sends messages: it can run a step now, and send its outputs."""
        self._ready.set()

    def announce_progress(self) -> None:
        """Tell the router, in an empty message, that the worker has made progress."""
        self._has_progress = True
        self._ready.set()

    async def next_message(self) -> bytes:
        """Wait for output and return all of it as one message, or an empty message if the worker
        has made progress. Raises Overloaded when the router has left too much output unread."""
        while True:
            await self._ready.wait()
            if self.closed:
                raise Overloaded("the router left too many outputs unread")
            if self._has_progress:
                self._has_progress = False
                return b""
            step = self._next_step(self) if self._next_step is not None else b""
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
