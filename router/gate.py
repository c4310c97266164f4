"""How many requests may be under way at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Overloaded


class Gate:
    """Counts answers, so that ``n`` and lists of prompts weigh what they cost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.inside = 0

    @contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Raises Overloaded when that many more are too many."""
        if self.inside + count > self._limit:
            raise Overloaded(
                f"{self.inside} requests are under way, and {self._limit} is the limit",
                retry_after_seconds=1.0,
            )
        self.inside += count
        try:
            yield
        finally:
            self.inside -= count
