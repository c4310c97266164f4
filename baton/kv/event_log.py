"""Reports to watchers which blocks a process has, with a log of the numbered changes for those that
are only a little behind."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from itertools import islice

from baton.core.ids import BlockKey, Incarnation
from baton.core.store import StoreChange, Tier, WatchEvent

MAX_CHANGES = 16_384
MAX_CHANGED_KEYS = 1_048_576
"""What is kept for watchers, about 60 MB; a watcher that is further behind gets a snapshot."""

PAGE_KEYS = 4096
"""Maximum number of keys per page of a snapshot. A watcher takes a few milliseconds to apply a
page."""


class EventLog:
    """The latest changes. They are numbered from 1; ``last_number`` is the number of the latest
    change."""

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


class BlockFeed:
    """Reports to watchers which blocks a process has: all of ``keys``, then the changes in the log
    ``events``. ``generation`` is the incarnation of the process; each change has a number that is
    unique within the incarnation."""

    def __init__(
        self,
        generation: Incarnation,
        events: EventLog,
        keys: Callable[[], Mapping[Tier, Sequence[BlockKey]]],
    ) -> None:
        self._generation = generation
        self._events = events
        self._keys = keys

    async def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """Yield a snapshot of the keys, then every change. A watcher that already knows
        everything up to change ``number`` of this ``generation`` gets only the later changes,
        without a snapshot, if the event log still has them."""
        known = generation == self._generation and self._events.changes_after(number) is not None
        while True:
            if not known:
                number = self._events.last_number
                for page in self._snapshot(number):
                    yield page
            for change in self._events.changes_after(number) or ():
                number = change.number
                yield self._change_event(change)
            await self._events.wait_for_change(number)
            known = self._events.changes_after(number) is not None

    def _snapshot(self, number: int) -> list[WatchEvent]:
        """Return all keys as of change ``number``, in pages."""
        pages = [
            WatchEvent(self._generation, number, tier, tuple(keys[start : start + PAGE_KEYS]))
            for tier, keys in self._keys().items()
            for start in range(0, len(keys), PAGE_KEYS)
        ]
        pages = pages or [WatchEvent(self._generation, number, Tier.NONE, ())]
        last = len(pages) - 1
        return [page.with_page_flags(reset=i == 0, more=i < last) for i, page in enumerate(pages)]

    def _change_event(self, change: StoreChange) -> WatchEvent:
        return WatchEvent(self._generation, change.number, change.tier, change.keys)
