"""The index of which store nodes have which blocks. It may be stale: only a node itself knows which
blocks it has."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier


@dataclass(frozen=True, slots=True)
class KvHolder:
    """One store node in one generation, that is, between two restarts. The blocks of its earlier
    generations are gone."""

    node: WorkerId
    generation: Incarnation


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The result of a search for the longest stored prefix: each node in ``holders`` has the first
    ``num_blocks`` of the blocks that were searched for."""

    num_blocks: int
    holders: tuple[KvHolder, ...]


class KvIndex(Protocol):
    """The interface of an index. Methods raise Unavailable if it can't be reached in time."""

    async def add(self, holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        """Record that ``holder`` has the blocks ``keys`` in ``tier``. This replaces the entries
        that the holder's node has for these blocks, in whichever generation, and may remove those
        of other holders that are not registered."""
        ...

    async def remove(self, holder: KvHolder, keys: Sequence[BlockKey]) -> None:
        """Record that ``holder`` no longer has the blocks ``keys``. Entries of the same node in
        other generations stay."""
        ...

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        """Find the longest prefix of ``keys`` that any node has, and all nodes that have it;
        ``num_blocks`` is 0 if no node has any of the blocks. The search is a bisection, since a
        node that has a block usually has all blocks before it."""
        ...

    async def holders(self, key: BlockKey) -> dict[KvHolder, Tier]:
        """Return the nodes that hold a block, each with the block's tier there."""
        ...

    async def register_holder(self, holder: KvHolder) -> bool:
        """Register ``holder``, and return whether it was already registered within the last day. If
        it was not, the index has lost the holder's entries, or never had them."""
        ...

    async def close(self) -> None: ...


FindHolders = Callable[[BlockKey], Awaitable[dict[KvHolder, Tier]]]


async def bisect_prefix(keys: Sequence[BlockKey], holders_of: FindHolders) -> PrefixHit:
    """Find the longest prefix of ``keys`` that any node has, by bisection. ``holders_of(key)``
    returns the nodes that have the block ``key``. Invariant: the nodes ``best`` have keys[:low],
    and no node has keys[high]. :func:`baton.core.prefix_search.count_leading` does the same without
    awaiting."""
    low, high = 0, len(keys)
    best: tuple[KvHolder, ...] = ()
    while low < high:
        middle = (low + high) // 2
        holders = await holders_of(keys[middle])
        if holders:
            low, best = middle + 1, tuple(holders)
        else:
            high = middle
    return PrefixHit(low, best)
