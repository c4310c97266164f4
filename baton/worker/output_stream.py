"""The worker's side of a router's stream, over which the router sends requests and cancellations,
and the worker sends outputs."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import Overloaded
from baton.rpc.convert.outputs import outputs_to_proto
from baton.worker.limits import MAX_MESSAGE_WEIGHT, MAX_UNREAD_LOGPROBS, MAX_UNREAD_OUTPUTS

OnSubmit = Callable[["OutputStream", RequestSpec, Task, WorkerRef | None], None]
OnCancel = Callable[[RequestId, Epoch], None]


class OutputStream:
    """Queues the outputs for one router and sends them in batches: the outputs of one step, or of
    several steps if the previous message took longer to send."""

    def __init__(
        self, submit: OnSubmit, cancel: OnCancel, on_close: Callable[["OutputStream"], None]
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._on_close = on_close
        self._unread: list[RequestOutput] = []
        self._num_unread_logprobs = 0
        self._has_rest = False
        """True if the last message left outputs unread."""
        self._has_progress = False
        self._ready = asyncio.Event()
        self.closed = False

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        self._submit(self, spec, task, source)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self._cancel(request_id, epoch)

    def refuse(self, output: RequestOutput) -> None:
        """Send the final output of a request that could not be accepted."""
        self.put(output)

    def put(self, output: RequestOutput) -> None:
        """Queue an output, or drop it if the stream is closed. Close the stream if too many outputs
        are unread."""
        if self.closed:
            return
        self._unread.append(output)
        if output.logprobs or output.prompt_logprobs:
            self._num_unread_logprobs += _num_logprobs(output)
        self._ready.set()
        if (
            len(self._unread) > MAX_UNREAD_OUTPUTS
            or self._num_unread_logprobs > MAX_UNREAD_LOGPROBS
        ):
            self.close()

    def announce_progress(self) -> None:
        """Tell the router, in a message without outputs, that the worker has made progress."""
        self._has_progress = True
        self._ready.set()

    async def next_outputs(self) -> Sequence[RequestOutput]:
        """Wait for outputs, and return those for one message, or none if the worker has made
        progress. Raises Overloaded if the stream is closed."""
        if self._has_rest:
            await asyncio.sleep(0)  # other tasks run between messages
        await self._ready.wait()
        if self.closed:
            raise Overloaded("the router left too many outputs unread")
        if self._has_progress:
            self._has_progress = False
            if not self._unread:
                self._ready.clear()
            return ()
        count = MAX_MESSAGE_WEIGHT if not self._num_unread_logprobs else _num_fitting(self._unread)
        unread, self._unread = self._unread[:count], self._unread[count:]
        if self._num_unread_logprobs:
            self._num_unread_logprobs -= sum(map(_num_logprobs, unread))
        self._has_rest = bool(self._unread)
        if not self._has_rest:
            self._ready.clear()
        return unread

    async def next_message(self) -> bytes:
        """As :meth:`next_outputs`, but encoded."""
        return outputs_to_proto(await self.next_outputs()).SerializeToString()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unread.clear()
            self._on_close(self)


def _num_fitting(outputs: Sequence[RequestOutput]) -> int:
    """Return how many outputs fit into one message, at least one."""
    total = 0
    for index, output in enumerate(outputs):
        total += 1 + _num_logprobs(output)
        if total > MAX_MESSAGE_WEIGHT and index > 0:
            return index
    return len(outputs)


def _num_logprobs(output: RequestOutput) -> int:
    """Return how many logprobs an output has, alternatives included."""
    return sum(1 + len(entry.top) for entry in chain(output.logprobs, output.prompt_logprobs))
