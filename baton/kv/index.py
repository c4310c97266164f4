"""Which store nodes hold which blocks. Only a hint: the holder has the last word."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.store import Tier


@dataclass(frozen=True, slots=True)
class KvHolder:
    """One life of one store node; what its earlier lives held is gone."""

    node: WorkerId
    generation: Incarnation


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first ``num_blocks`` keys are held by each of ``holders``."""

    num_blocks: int
    holders: tuple[KvHolder, ...]


class KvIndex(Protocol):
    """Methods raise Unavailable when the index can't be reached in time."""

    async def add(self, holder: KvHolder, keys: Sequence[BlockKey], tier: Tier) -> None:
        """``holder`` has these in ``tier``. Replaces what it said before, also in earlier
        lives."""
        ...

    async def remove(self, holder: KvHolder, keys: Sequence[BlockKey]) -> None:
        """``holder`` has these no more. An entry of another life stays."""
        ...

    async def longest_prefix(self, keys: Sequence[BlockKey]) -> PrefixHit:
        """By bisection, since a node that holds a block holds, as a rule, all before it."""
        ...

    async def holders(self, key: BlockKey) -> dict[KvHolder, Tier]:
        """Who holds one block, and where."""
        ...

    async def greet(self, holder: KvHolder) -> bool:
        """Whether ``holder`` has greeted before, within a day: else the index has forgotten, or
        never knew, what it holds."""
        ...

    async def close(self) -> None: ...


FindHolders = Callable[[BlockKey], Awaitable[dict[KvHolder, Tier]]]


async def bisect_prefix(keys: Sequence[BlockKey], holders_of: FindHolders) -> PrefixHit:
    """Invariant: keys[:low] are held by ``best``, keys[high] by nobody."""
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
