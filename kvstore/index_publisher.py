"""Tells the index, in the background, what the node holds."""

import asyncio
from collections.abc import Iterable

import structlog

from baton.clock import Clock
from baton.core.ids import BlockKey
from baton.core.store import StoreChange, Tier
from baton.errors import BatonError
from baton.kv.index import KvHolder, KvIndex
from kvstore.node import StoreNode

RETRY_SECONDS = 1.0
REGISTRATION_CHECK_SECONDS = 5.0
"""Between looks whether the index still knows us: it may have been flushed."""

log = structlog.get_logger(__name__)


class IndexPublisher:
    """Follows the node's event log. While the index can't be reached it stays where it is; what
    the log has forgotten by then is told from what the node holds."""

    def __init__(self, holder: KvHolder, node: StoreNode, index: KvIndex, clock: Clock) -> None:
        self._holder = holder
        self._node = node
        self._index = index
        self._clock = clock
        self._told = -1
        """Number of the last change that the index knows; -1: it must be told everything."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._catch_up()
            except BatonError as error:
                log.warning("index_unreachable", error=str(error))
                await self._clock.sleep(RETRY_SECONDS)
                continue
            try:
                async with asyncio.timeout(REGISTRATION_CHECK_SECONDS):
                    await self._node.events.wait(self._told)
            except TimeoutError:
                continue

    async def _catch_up(self) -> None:
        if not await self._index.greet(self._holder):
            self._told = -1
        changes = self._node.events.after(self._told) if self._told >= 0 else None
        if changes is None:
            number = self._node.events.number
            for tier, keys in self._node.keys().items():
                await self._index.add(self._holder, keys, tier)
            self._told = number
            return
        for number, tier, moved in _merged(changes):
            if tier is Tier.NONE:
                await self._index.remove(self._holder, moved)
            else:
                await self._index.add(self._holder, moved, tier)
            self._told = number


def _merged(changes: Iterable[StoreChange]) -> list[tuple[int, Tier, list[BlockKey]]]:
    """Neighbours of one tier as one: (number of the last, tier, keys)."""
    merged: list[tuple[int, Tier, list[BlockKey]]] = []
    for change in changes:
        if merged and merged[-1][1] is change.tier:
            _, tier, keys = merged.pop()
            merged.append((change.number, tier, [*keys, *change.keys]))
        else:
            merged.append((change.number, change.tier, list(change.keys)))
    return merged
