"""The node's numbered changes, kept for watchers that are a little behind."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.ids import BlockKey
from baton.core.store import StoreChange, Tier

MAX_CHANGES = 16_384
MAX_CHANGED_KEYS = 1_048_576
"""About 60 MB of keys; whoever is further behind gets a snapshot."""


class EventLog:
    """Changes are numbered from 1; ``number`` is the latest one's."""

    def __init__(self) -> None:
        self.number = 0
        self._changes: deque[StoreChange] = deque()
        self._num_keys = 0
        self._news = asyncio.Event()

    def append(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        self.number += 1
        self._changes.append(StoreChange(self.number, tier, tuple(keys)))
        self._num_keys += len(keys)
        while len(self._changes) > MAX_CHANGES or self._num_keys > MAX_CHANGED_KEYS:
            self._num_keys -= len(self._changes.popleft().keys)
        self._news.set()
        self._news = asyncio.Event()

    def after(self, number: int) -> Iterable[StoreChange] | None:
        """The changes since that one; None when some of them are forgotten, or never were."""
        missing = self.number - number
        if missing < 0 or missing > len(self._changes):
            return None
        return list(islice(self._changes, len(self._changes) - missing, None))

    async def wait(self, number: int) -> None:
        """Until there is a change after that one."""
        while self.number <= number:
            await self._news.wait()
