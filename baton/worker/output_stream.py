"""A router's stream, seen from the worker: what came over it, and what goes back."""

import asyncio
from collections.abc import Callable, Sequence

from baton.core.ids import Epoch, RequestId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import MAX_PROMPT_LOGPROBS, RequestOutput, RequestSpec
from baton.core.task import Task
from baton.errors import Overloaded

MAX_UNREAD_OUTPUTS = 65_536
"""About 20 MB; a router that has left so many unread is gone or hopelessly behind."""

MAX_UNREAD_PROMPT_LOGPROBS = 16 * MAX_PROMPT_LOGPROBS
"""Tokens of prompts, with some hundred bytes of logprobs each."""

OnSubmit = Callable[["OutputStream", RequestSpec, Task, WorkerRef | None], None]
OnCancel = Callable[[RequestId, Epoch], None]


class OutputStream:
    """Collects a step's outputs into one message, and more while the writer is busy."""

    def __init__(
        self, submit: OnSubmit, cancel: OnCancel, on_close: Callable[["OutputStream"], None]
    ) -> None:
        self._submit = submit
        self._cancel = cancel
        self._on_close = on_close
        self._unread: list[RequestOutput] = []
        self._num_scores = 0
        self._ready = asyncio.Event()
        self.closed = False

    def submit(self, spec: RequestSpec, task: Task, source: WorkerRef | None) -> None:
        self._submit(self, spec, task, source)

    def cancel(self, request_id: RequestId, epoch: Epoch) -> None:
        self._cancel(request_id, epoch)

    def refuse(self, output: RequestOutput) -> None:
        """Tells the end of a request that could not be taken."""
        self.put(output)

    def put(self, output: RequestOutput) -> None:
        """Dropped once closed; a router that leaves too much unread is closed."""
        if self.closed:
            return
        self._unread.append(output)
        self._num_scores += len(output.prompt_logprobs)
        self._ready.set()
        if len(self._unread) > MAX_UNREAD_OUTPUTS or self._num_scores > MAX_UNREAD_PROMPT_LOGPROBS:
            self.close()

    async def outputs(self) -> Sequence[RequestOutput]:
        await self._ready.wait()
        if self.closed:
            raise Overloaded("the router left too many outputs unread")
        count = _fitting(self._unread)
        unread, self._unread = self._unread[:count], self._unread[count:]
        self._num_scores -= sum(len(output.prompt_logprobs) for output in unread)
        if not self._unread:
            self._ready.clear()
        return unread

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unread.clear()
            self._on_close(self)


def _fitting(outputs: Sequence[RequestOutput]) -> int:
    """How many go into one message: all, but for prompts that were scored. At least one."""
    total = 0
    for index, output in enumerate(outputs):
        if output.prompt_logprobs:
            total += len(output.prompt_logprobs) * (1 + len(output.prompt_logprobs[0].top))
            if total > MAX_PROMPT_LOGPROBS and index > 0:
                return index
    return len(outputs)
