"""Where blocks are believed to lie: on devices as they were sent there, in stores as they tell."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from baton.core.ids import BlockKey, WorkerId
from baton.core.store import StoreHint
from conductor.mirror import Mirror
from conductor.policy.fleet import Key, PrefillView, Stored
from conductor.traffic import Heads, Placed


class Beliefs:
    """Implements :class:`conductor.policy.fleet.CacheView`. What it gets wrong costs a recompute:
    the worker looks for itself."""

    def __init__(self, mirror: Mirror) -> None:
        self.placed = Placed()
        self.handed_over = Placed()
        """What decode workers got, or read themselves."""
        self.heads = Heads()
        self._mirror = mirror
        self._beside: Mapping[str, Sequence[WorkerId]] = {}
        self._asked: tuple[Sequence[Key], int] = ((), -1)
        self._best: StoreHint | None = None

    def forget(self, worker: WorkerId) -> None:
        """It is gone, and its pool with it."""
        self.placed.forget(worker)
        self.handed_over.forget(worker)

    def bound(self, read_blocks: int, written_blocks: int) -> None:
        """What all prefill workers' pools hold, and all decode workers'; 0: nobody knows."""
        self.placed.bound(read_blocks)
        self.handed_over.bound(written_blocks)

    def seat(self, beside: Mapping[str, Sequence[WorkerId]]) -> None:
        """Which prefill workers are on the host of which store node."""
        self._beside = beside

    def hint(self, node: str, keys: Sequence[BlockKey]) -> StoreHint | None:
        """Where a worker is to look, whose own host's store is ``node``: there, unless another
        has more."""
        own, best = self._mirror.held(WorkerId(node), keys), self._best_node(keys)
        if own and best is not None and best.num_blocks <= own:
            return StoreHint(WorkerId(node), own)
        return best

    # -- CacheView -------------------------------------------------------------------------

    def local_blocks(self, view: PrefillView, keys: Sequence[Key]) -> int:
        read, got = self.placed, self.handed_over
        device = max(read.cached_blocks(view.id, keys), got.cached_blocks(view.id, keys))
        return max(device, self._mirror.held(WorkerId(view.node), _block_keys(keys)))

    def holders(self, keys: Sequence[Key], count: int) -> list[WorkerId]:
        """Those that were sent it go before those that may read it from beside them."""
        names = self.placed.holders(keys, count)
        depths = {name: self.placed.cached_blocks(name, keys) for name in names}
        best = self._best_node(keys)
        if best is not None:
            for name in islice(self._beside.get(best.node, ()), count):
                depths[name] = max(depths.get(name, 0), best.num_blocks)
        return sorted(depths, key=lambda name: -depths[name])[:count]

    def stored(self, keys: Sequence[Key]) -> Stored | None:
        best = self._best_node(keys)
        return None if best is None else Stored(best.node, best.num_blocks)

    def share(self, key: Key) -> float:
        return self.heads.share(key)

    def _best_node(self, keys: Sequence[Key]) -> StoreHint | None:
        """Looked up once for a decision, which asks for it three times."""
        asked, num_changes = self._asked
        if asked is not keys or num_changes != self._mirror.num_changes:
            self._asked = keys, self._mirror.num_changes
            self._best = self._mirror.best(_block_keys(keys))
        return self._best


def _block_keys(keys: Sequence[Key]) -> Sequence[BlockKey]:
    """Those of a live request are nothing else."""
    return cast(Sequence[BlockKey], keys)
