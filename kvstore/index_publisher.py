"""Publishes a store node's contents to the KV index, in the background."""

import asyncio
from collections.abc import Iterable, Iterator

import structlog

from baton.clock import Clock
from baton.core.ids import BlockKey
from baton.core.store import StoreChange, Tier
from baton.errors import BatonError
from baton.kv.index import KvHolder, KvIndex
from kvstore.limits import MAX_MERGED_KEYS
from kvstore.node import StoreNode

RETRY_SECONDS = 1.0
REGISTRATION_CHECK_SECONDS = 5.0
"""Interval between checks that the index still lists the node, since the index may have been
flushed."""

log = structlog.get_logger(__name__)


class IndexPublisher:
    """Follows the node's event log. While the index can't be reached, the publisher's position in
    the log does not advance. If the log no longer has the changes after that position, all of the
    node's keys are published."""

    def __init__(self, holder: KvHolder, node: StoreNode, index: KvIndex, clock: Clock) -> None:
        self._holder = holder
        self._node = node
        self._index = index
        self._clock = clock
        self._published_number = -1
        """Number of the last change that the index has, or -1 if all keys must be published."""

    async def run(self) -> None:
        """Publish changes until cancelled."""
        while True:
            try:
                await self._catch_up()
            except BatonError as error:
                log.warning("index_unreachable", error=str(error))
                await self._clock.sleep(RETRY_SECONDS)
                continue
            try:
                async with asyncio.timeout(REGISTRATION_CHECK_SECONDS):
                    await self._node.events.wait_for_change(self._published_number)
            except TimeoutError:
                continue

    async def _catch_up(self) -> None:
        if not await self._index.register_holder(self._holder):
            self._published_number = -1
        changes = (
            self._node.events.changes_after(self._published_number)
            if self._published_number >= 0
            else None
        )
        if changes is None:
            number = self._node.events.last_number
            for tier, keys in self._node.keys().items():
                await self._index.add(self._holder, keys, tier)
            self._published_number = number
            return
        for number, tier, keys in _merge(changes):
            if tier is Tier.NONE:
                await self._index.remove(self._holder, keys)
            else:
                await self._index.add(self._holder, keys, tier)
            self._published_number = number


def _merge(changes: Iterable[StoreChange]) -> Iterator[tuple[int, Tier, list[BlockKey]]]:
    """Merge consecutive changes of the same tier. Yield tuples (number of the last change, tier,
    keys), each with at most ``MAX_MERGED_KEYS`` keys, or with those of one change that has more."""
    number, tier, keys = 0, Tier.NONE, list[BlockKey]()
    for change in changes:
        is_full = len(keys) + len(change.keys) > MAX_MERGED_KEYS
        if keys and (is_full or change.tier is not tier):
            yield number, tier, keys
            keys = []
        number, tier = change.number, change.tier
        keys.extend(change.keys)
    if keys:
        yield number, tier, keys
