"""The worker's side of a router's stream, over which the router sends requests and cancellations,
and the worker sends outputs."""

import asyncio
from collections.abc import Callable, Sequence

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import MAX_PROMPT_LOGPROBS, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import Overloaded

MAX_UNREAD_OUTPUTS = 65_536
"""Limit of unread outputs, about 20 MB. A router with so many unread outputs is gone or hopelessly
behind."""

MAX_UNREAD_PROMPT_LOGPROBS = 16 * MAX_PROMPT_LOGPROBS
"""Limit of prompt tokens whose logprobs are unread; they take a few hundred bytes each."""

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
        self._num_unread_logprobs += len(output.prompt_logprobs)
        self._ready.set()
        if (
            len(self._unread) > MAX_UNREAD_OUTPUTS
            or self._num_unread_logprobs > MAX_UNREAD_PROMPT_LOGPROBS
        ):
            self.close()

    async def next_outputs(self) -> Sequence[RequestOutput]:
        await self._ready.wait()
        if self.closed:
            raise Overloaded("the router left too many outputs unread")
        count = _num_fitting(self._unread)
        unread, self._unread = self._unread[:count], self._unread[count:]
        self._num_unread_logprobs -= sum(len(output.prompt_logprobs) for output in unread)
        if not self._unread:
            self._ready.clear()
        return unread

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unread.clear()
            self._on_close(self)


def _num_fitting(outputs: Sequence[RequestOutput]) -> int:
    """Return how many outputs fit into one message: all of them, unless they have many prompt
    logprobs, but at least one."""
    total = 0
    for index, output in enumerate(outputs):
        if output.prompt_logprobs:
            total += len(output.prompt_logprobs) * (1 + len(output.prompt_logprobs[0].top))
            if total > MAX_PROMPT_LOGPROBS and index > 0:
                return index
    return len(outputs)
