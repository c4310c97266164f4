"""How many logprobs of prompts a router has on its hands at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.request import MAX_PROMPT_LOGPROBS
from baton.errors import Overloaded

MAX_INFLIGHT_PROMPT_LOGPROBS = 8 * MAX_PROMPT_LOGPROBS
"""Some 300 bytes each, from the worker's message to the client's JSON."""


class PromptLogprobsBudget:
    """Single event loop."""

    def __init__(self, limit: int = MAX_INFLIGHT_PROMPT_LOGPROBS) -> None:
        self._limit = limit
        self.taken = 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """As long as a request is under way. Raises Overloaded while others have too many."""
        if self.taken + count > self._limit:
            raise Overloaded("others ask for the logprobs of long prompts just now")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
