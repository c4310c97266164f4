"""A log of the numbered changes of a store node, for watchers that are only a little behind."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from baton.core.ids import BlockKey
from baton.core.store import StoreChange, Tier

MAX_CHANGES = 16_384
MAX_CHANGED_KEYS = 1_048_576
"""Maximum number of keys kept, about 60 MB; a watcher that is further behind gets a snapshot."""


class EventLog:
    """The latest changes of the store's contents. They are numbered from 1; ``last_number`` is the
    number of the latest change."""

    def __init__(self) -> None:
        self.last_number = 0
        self._changes: deque[StoreChange] = deque()
        self._num_keys = 0
        self._changed = asyncio.Event()

    def append(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        self.last_number += 1
        self._changes.append(StoreChange(self.last_number, tier, tuple(keys)))
        self._num_keys += len(keys)
        while len(self._changes) > MAX_CHANGES or self._num_keys > MAX_CHANGED_KEYS:
            self._num_keys -= len(self._changes.popleft().keys)
        self._changed.set()
        self._changed = asyncio.Event()

    def changes_after(self, number: int) -> Iterable[StoreChange] | None:
        """Return the changes after number ``number``. Return None if some of them were dropped from
        the log, or if ``number`` is greater than ``last_number``."""
        missing = self.last_number - number
        if missing < 0 or missing > len(self._changes):
            return None
        return list(islice(self._changes, len(self._changes) - missing, None))

    async def wait_for_change(self, number: int) -> None:
        """Wait until there is a change after number ``number``."""
        while self.last_number <= number:
            await self._changed.wait()
