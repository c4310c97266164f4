"""Estimates where blocks are cached: on which workers, from the requests sent to them or from the
changes that they report, and in which store nodes, from the changes that the nodes report."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from baton.core.ids import BlockKey, WorkerId
from baton.core.store import StoreHint
from baton.placement.prefix_popularity import PrefixPopularity
from conductor.approx_prefix_index import ApproxPrefixIndex
from conductor.policy.snapshot import AnyBlockKey, PrefillView, StoredPrefix
from conductor.store_mirror import StoreMirror


class CacheIndex:
    """Implements :class:`conductor.policy.snapshot.CacheView`. A wrong estimate only costs
    recomputation: the worker itself looks up its cache and the store."""

    def __init__(self, mirror: StoreMirror, reported: StoreMirror | None = None) -> None:
        """``reported`` has the blocks of the workers that report what they have cached."""
        self._reported = StoreMirror() if reported is None else reported
        self.prefill_index = ApproxPrefixIndex()
        self.decode_index = ApproxPrefixIndex()
        """Blocks that decode workers imported or prefilled themselves."""
        self.popularity = PrefixPopularity()
        self._mirror = mirror
        self._workers_by_node: Mapping[str, Sequence[WorkerId]] = {}
        self._best_node_query: tuple[Sequence[AnyBlockKey], int] = ((), -1)
        self._best_node_result: StoreHint | None = None

    def remove_worker(self, worker: WorkerId) -> None:
        """Remove a worker that has left or restarted."""
        self.prefill_index.remove_worker(worker)
        self.decode_index.remove_worker(worker)

    def set_capacity(self, prefill_blocks: int, decode_blocks: int) -> None:
        """Set the total number of blocks of all prefill workers and of all decode workers; 0 if
        unknown."""
        self.prefill_index.set_capacity(prefill_blocks)
        self.decode_index.set_capacity(decode_blocks)

    def set_workers_by_node(self, workers_by_node: Mapping[str, Sequence[WorkerId]]) -> None:
        """Set, for each store node, which prefill workers are on its host."""
        self._workers_by_node = workers_by_node

    def store_hint(self, node: str, keys: Sequence[BlockKey]) -> StoreHint | None:
        """Return the store node from which a worker should fetch its prefix. This is ``node``, the
        store node on the worker's host, unless another node has more blocks. Return None if no node
        has any of the blocks."""
        own, best = self._mirror.num_leading_blocks(WorkerId(node), keys), self._best_node(keys)
        if own and best is not None and best.num_blocks <= own:
            return StoreHint(WorkerId(node), own)
        return best

    # -- CacheView -------------------------------------------------------------------------

    def num_device_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        if self._reported.knows(worker):
            return self._reported.num_leading_blocks(worker, _block_keys(keys))
        indexes = self.prefill_index, self.decode_index
        return max(index.num_cached_blocks(worker, keys) for index in indexes)

    def num_local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        device = self.num_device_blocks(view.id, keys)
        return max(device, self._mirror.num_leading_blocks(WorkerId(view.node), _block_keys(keys)))

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Return up to ``count`` prefill workers, starting with those that have the most leading
        blocks on their device or in the store on their host. Among workers with equally many
        blocks, those that have the blocks on their device come first."""
        names = self.prefill_index.workers_with_prefix(keys, count)
        depths = {
            name: self.prefill_index.num_cached_blocks(name, keys)
            for name in names
            if not self._reported.knows(name)
        }
        for name in self._reported.nodes_with_prefix(_block_keys(keys)):
            depths[name] = self._reported.num_leading_blocks(name, _block_keys(keys))
        best = self._best_node(keys)
        if best is not None:
            for name in islice(self._workers_by_node.get(best.node, ()), count):
                depths[name] = max(depths.get(name, 0), best.num_blocks)
        return sorted(depths, key=lambda name: -depths[name])[:count]

    def longest_stored_prefix(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        best = self._best_node(keys)
        return None if best is None else StoredPrefix(best.node, best.num_blocks)

    def request_share(self, key: AnyBlockKey) -> float:
        return self.popularity.request_share(key)

    def _best_node(self, keys: Sequence[AnyBlockKey]) -> StoreHint | None:
        """Return the node with the longest prefix; None if no node has any block of it. The result
        is cached, since each decision needs it three times."""
        asked, num_changes = self._best_node_query
        if asked is not keys or num_changes != self._mirror.num_changes:
            self._best_node_query = keys, self._mirror.num_changes
            self._best_node_result = self._mirror.best_node(_block_keys(keys))
        return self._best_node_result


def _block_keys(keys: Sequence[AnyBlockKey]) -> Sequence[BlockKey]:
    """Narrow the type: in the live conductor, all keys are block keys."""
    return cast(Sequence[BlockKey], keys)
