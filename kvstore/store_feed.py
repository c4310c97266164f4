"""The stream of a store's contents and changes that watchers receive."""

from collections.abc import AsyncGenerator

from baton.core.ids import Incarnation
from baton.core.store import StoreChange, Tier, WatchEvent
from kvstore.tiered_store import TieredStore

PAGE_KEYS = 4096
"""Maximum number of keys per page of a snapshot. A watcher takes a few milliseconds to apply a
page."""


class StoreFeed:
    """Reports to watchers what a store contains. ``generation`` is the incarnation of the node;
    each change has a number that is unique within the incarnation."""

    def __init__(self, generation: Incarnation, tiers: TieredStore) -> None:
        self._generation = generation
        self._tiers = tiers
        self._events = tiers.events

    async def watch(self, generation: Incarnation, number: int) -> AsyncGenerator[WatchEvent]:
        """Yield a snapshot of the stored keys, then every change. A watcher that already knows
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
        """Return all stored keys as of change ``number``, in pages."""
        pages = [
            WatchEvent(self._generation, number, tier, tuple(keys[start : start + PAGE_KEYS]))
            for tier, keys in self._tiers.keys().items()
            for start in range(0, len(keys), PAGE_KEYS)
        ]
        pages = pages or [WatchEvent(self._generation, number, Tier.NONE, ())]
        last = len(pages) - 1
        return [page.with_page_flags(reset=i == 0, more=i < last) for i, page in enumerate(pages)]

    def _change_event(self, change: StoreChange) -> WatchEvent:
        return WatchEvent(self._generation, change.number, change.tier, change.keys)
