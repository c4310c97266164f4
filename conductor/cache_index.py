"""Where blocks are believed to lie: on devices as they were sent there, in stores as they tell."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from baton.core.ids import BlockKey, WorkerId
from baton.core.store import StoreHint
from conductor.approx_prefix_index import ApproxPrefixIndex, PrefixPopularity
from conductor.policy.snapshot import AnyBlockKey, PrefillView, StoredPrefix
from conductor.store_mirror import StoreMirror


class CacheIndex:
    """Implements :class:`conductor.policy.snapshot.CacheView`. What it gets wrong costs a
    recompute: the worker looks for itself."""

    def __init__(self, mirror: StoreMirror) -> None:
        self.placed = ApproxPrefixIndex()
        self.handed_over = ApproxPrefixIndex()
        """What decode workers got, or read themselves."""
        self.heads = PrefixPopularity()
        self._mirror = mirror
        self._beside: Mapping[str, Sequence[WorkerId]] = {}
        self._asked: tuple[Sequence[AnyBlockKey], int] = ((), -1)
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

    def local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        read, got = self.placed, self.handed_over
        device = max(read.cached_blocks(view.id, keys), got.cached_blocks(view.id, keys))
        return max(device, self._mirror.held(WorkerId(view.node), _block_keys(keys)))

    def holders(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Those that were sent it go before those that may read it from beside them."""
        names = self.placed.holders(keys, count)
        depths = {name: self.placed.cached_blocks(name, keys) for name in names}
        best = self._best_node(keys)
        if best is not None:
            for name in islice(self._beside.get(best.node, ()), count):
                depths[name] = max(depths.get(name, 0), best.num_blocks)
        return sorted(depths, key=lambda name: -depths[name])[:count]

    def stored(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        best = self._best_node(keys)
        return None if best is None else StoredPrefix(best.node, best.num_blocks)

    def share(self, key: AnyBlockKey) -> float:
        return self.heads.share(key)

    def _best_node(self, keys: Sequence[AnyBlockKey]) -> StoreHint | None:
        """Looked up once for a decision, which asks for it three times."""
        asked, num_changes = self._asked
        if asked is not keys or num_changes != self._mirror.num_changes:
            self._asked = keys, self._mirror.num_changes
            self._best = self._mirror.best(_block_keys(keys))
        return self._best


def _block_keys(keys: Sequence[AnyBlockKey]) -> Sequence[BlockKey]:
    """Those of a live request are nothing else."""
    return cast(Sequence[BlockKey], keys)
