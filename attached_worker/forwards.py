"""The requests that routers forward to the server's own API, as they pass through the worker."""

import re
from collections.abc import AsyncGenerator, Callable

from attached_worker.server import ModelServer, RelayedAnswer
from baton.core.server_api import ForwardedHead, ForwardRequest
from baton.errors import BatonError, Unavailable

MAX_SHOWN_BYTES = 500
"""How much of a server's answer is shown in the error that it becomes."""

NOT_IMPLEMENTED = 501
_FAILURE = re.compile(rb'^data: \{"error":.*"code":\s*5\d\d|"finish_reason":\s*"abort"')
"""Matches the beginning of an answer with status 200 whose engine has died, or whose server shuts
down. In a text of the answer, the quotes would be escaped."""


class ForwardedRequests:
    """The forwarded requests that are in progress. ``on_progress`` is called when the server sends
    anything, and ``on_failure`` when it fails."""

    def __init__(
        self, server: ModelServer, on_progress: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        self._server = server
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._running: dict[RelayedAnswer, int] = {}
        """Their answers, and the tokens of each that has not begun."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> list[int]:
        """The estimated tokens of each request whose answer has not begun."""
        return [num_tokens for num_tokens in self._running.values() if num_tokens]

    async def relay(self, request: ForwardRequest) -> AsyncGenerator[ForwardedHead | bytes]:
        """Yield the server's answer as it comes. Raises Unavailable if the server fails, in
        whatever form it says so: then another one is asked, unless the answer has begun."""
        answer = self._server.relay(request)
        self._running[answer] = max(request.num_tokens, 1)
        try:
            head = await answer.start()
            body = answer.body()
            first = await anext(body, b"")  # a stream's head comes before anything is computed
            self._running[answer] = 0
            self._on_progress()
            if (head.status >= 500 and head.status != NOT_IMPLEMENTED) or _FAILURE.search(first):
                shown = first[:MAX_SHOWN_BYTES].decode(errors="replace")
                raise Unavailable(f"the server failed with status {head.status}: {shown}")
            yield head
            yield first
            async for data in body:
                self._on_progress()
                yield data
        except Unavailable:
            self._on_failure()
            raise
        finally:
            del self._running[answer]
            answer.abort()

    def fail(self, error: BatonError) -> None:
        """Cancel all requests at the server; their readers get ``error``."""
        for answer in self._running:
            answer.fail(error)
