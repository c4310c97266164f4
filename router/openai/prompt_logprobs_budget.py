"""A limit on the prompt logprobs that a router handles at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.request import MAX_PROMPT_LOGPROBS
from baton.errors import Overloaded

MAX_INFLIGHT_PROMPT_LOGPROBS = 8 * MAX_PROMPT_LOGPROBS
"""The maximum number of prompt logprobs of all requests in flight. Each takes some 300 bytes in
memory, from the worker's message to the client's JSON."""


class PromptLogprobsBudget:
    """Counts the prompt logprobs of requests in flight. Not thread-safe: use it on one event
    loop."""

    def __init__(self, limit: int = MAX_INFLIGHT_PROMPT_LOGPROBS) -> None:
        self._limit = limit
        self.num_reserved = 0

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve ``count`` prompt logprobs while a request is in flight. Raises Overloaded if
        other requests have reserved too many."""
        if self.num_reserved + count > self._limit:
            raise Overloaded("too many prompt logprobs of other requests are in flight")
        self.num_reserved += count
        try:
            yield
        finally:
            self.num_reserved -= count
