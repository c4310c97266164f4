"""The caches of a simulated cluster, and the network between its hosts."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from baton.core.ids import WorkerId
from baton.core.prefix_search import count_leading
from baton.placement.prefix_popularity import PrefixPopularity
from conductor.policy.snapshot import AnyBlockKey, LinkSpeed, PrefillView, StoredPrefix


class LruTier:
    """An LRU cache of at most ``num_blocks`` blocks. When a prefix is used, its blocks are renewed
    from the last to the first, so that the first blocks are evicted last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[AnyBlockKey, None] = OrderedDict()

    def num_leading(self, keys: Sequence[AnyBlockKey]) -> int:
        """Return the length, in blocks, of the longest prefix of ``keys`` that this tier has. A
        tier that has a block also has all earlier blocks of the prefix, since these are renewed
        after the block whenever it is used; so bisection finds the length."""
        blocks = self.blocks
        return count_leading(keys, lambda key: key not in blocks)

    def insert(
        self, keys: Sequence[AnyBlockKey]
    ) -> tuple[Sequence[AnyBlockKey], list[AnyBlockKey]]:
        """Add the blocks of a prefix, and renew those that are here already. Returns the added and
        the evicted keys."""
        blocks = self.blocks
        known = self.num_leading(keys)
        added = keys[known:]
        for key in reversed(added):
            blocks[key] = None
        for key in reversed(keys[:known]):
            blocks.move_to_end(key)
        evicted = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.num_blocks)]
        return added, evicted


class HolderIndex:
    """Knows which store nodes have which blocks."""

    def __init__(self) -> None:
        self._nodes: dict[AnyBlockKey, list[str]] = {}

    def add(self, node: str, keys: Sequence[AnyBlockKey]) -> None:
        for key in keys:
            self._nodes.setdefault(key, []).append(node)

    def remove(self, node: str, keys: Sequence[AnyBlockKey]) -> None:
        for key in keys:
            nodes = self._nodes[key]
            nodes.remove(node)
            if not nodes:
                del self._nodes[key]

    def nodes_with(self, key: AnyBlockKey) -> Sequence[str]:
        return self._nodes.get(key, ())

    def num_stored(self, keys: Sequence[AnyBlockKey]) -> int:
        """Return the length, in blocks, of the longest prefix of ``keys`` that any node has."""
        nodes = self._nodes
        return count_leading(keys, lambda key: key not in nodes)

    def best_nodes(self, keys: Sequence[AnyBlockKey], count: int) -> list[str]:
        """Return up to ``count`` nodes that have a prefix of ``keys``. Nodes with a longer prefix
        come first."""
        found: list[str] = []
        depth = self.num_stored(keys)
        while depth > 0:
            found += [node for node in self.nodes_with(keys[depth - 1]) if node not in found]
            if len(found) >= count:
                return found[:count]
            depth = self._deepest_of_others(keys[:depth], len(found))
        return found

    def _deepest_of_others(self, keys: Sequence[AnyBlockKey], num_known: int) -> int:
        """``num_known`` nodes have all of ``keys``. Return the length, in blocks, of the longest
        prefix that any other node has, which is the longest one that more than ``num_known`` nodes
        have."""
        return count_leading(keys, lambda key: len(self.nodes_with(key)) <= num_known)


class SimulatedCaches:
    """The cached blocks on each worker's device and in each host's store. The policies query this
    class as their :class:`CacheView`. It has no delay, since that of a live conductor's view is
    only milliseconds."""

    def __init__(
        self,
        host_of: Mapping[WorkerId, str],
        prefills: Sequence[WorkerId],
        device_blocks: int,
        node_blocks: int,
    ) -> None:
        self._device_blocks, self._node_blocks = device_blocks, node_blocks
        self._host_of = dict(host_of)
        self._devices = {worker: LruTier(device_blocks) for worker in host_of}
        self._nodes = {host: LruTier(node_blocks) for host in host_of.values()}
        self._prefills: dict[str, list[WorkerId]] = {}
        for worker in prefills:
            self._prefills.setdefault(host_of[worker], []).append(worker)
        self._gone: set[WorkerId] = set()
        self._holder_index = HolderIndex()
        self._popularity = PrefixPopularity()

    def add_worker(self, worker: WorkerId, host: str, is_prefill: bool) -> None:
        """Add a worker, and its host's store if the host is new."""
        self._host_of[worker] = host
        self._devices[worker] = LruTier(self._device_blocks)
        self._nodes.setdefault(host, LruTier(self._node_blocks))
        if is_prefill:
            self._prefills.setdefault(host, []).append(worker)

    def resize_device(self, worker: WorkerId, num_blocks: int) -> None:
        """Give a worker another capacity than the others. Its cache is empty afterwards."""
        self._devices[worker] = LruTier(num_blocks)

    def cache_computed(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        """Cache blocks that a worker has computed, and publish them to its host's store."""
        self._devices[worker].insert(keys)
        host = self._host_of[worker]
        added, evicted = self._nodes[host].insert(keys)
        self._holder_index.add(host, added)
        self._holder_index.remove(host, evicted)

    def cache_imported(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        """Cache blocks that a worker has imported."""
        self._devices[worker].insert(keys)

    def record_request(self, keys: Sequence[AnyBlockKey]) -> None:
        self._popularity.record(keys)

    def clear_worker(self, worker: WorkerId) -> None:
        """Empty the device cache of a worker that crashed or was retired. Until
        :meth:`restore_worker` is called, :meth:`workers_with_prefix` does not return the worker.
        The store of its host keeps its blocks."""
        self._gone.add(worker)
        self._devices[worker] = LruTier(self._devices[worker].num_blocks)

    def restore_worker(self, worker: WorkerId) -> None:
        self._gone.discard(worker)

    def num_host_blocks(self, host: str, keys: Sequence[AnyBlockKey]) -> int:
        return self._nodes[host].num_leading(keys)

    # -- CacheView -------------------------------------------------------------------------

    def num_device_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        return self._devices[worker].num_leading(keys)

    def num_local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        device = self._devices[view.id].num_leading(keys)
        return max(device, self._nodes[view.node].num_leading(keys))

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        hosts = self._holder_index.best_nodes(keys, count + len(self._gone))
        workers = (worker for host in hosts for worker in self._prefills.get(host, ()))
        return [worker for worker in workers if worker not in self._gone][:count]

    def longest_stored_prefix(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        depth = self._holder_index.num_stored(keys)
        return (
            StoredPrefix(self._holder_index.nodes_with(keys[depth - 1])[0], depth)
            if depth
            else None
        )

    def request_share(self, key: AnyBlockKey) -> float:
        return self._popularity.request_share(key)


class SimulatedNetwork:
    """The network between the hosts. Each host has one inbound and one outbound link, and each link
    carries one transfer at a time."""

    def __init__(self, hosts: Sequence[str], link: LinkSpeed) -> None:
        self._link = link
        self._free_in = dict.fromkeys(hosts, 0.0)
        self._free_out = dict.fromkeys(hosts, 0.0)

    def add_host(self, host: str) -> None:
        """Add a host, unless it was added before."""
        self._free_in.setdefault(host, 0.0)
        self._free_out.setdefault(host, 0.0)

    def send(self, source: str, target: str, size_bytes: float, now_seconds: float) -> float:
        """Send ``size_bytes`` from host ``source`` to host ``target`` once both links are free.
        Returns the virtual time, in seconds, at which the last byte arrives."""
        seconds = self._link.seconds(size_bytes)
        self._free_out[source] = max(now_seconds, self._free_out[source]) + seconds
        self._free_in[target] = max(now_seconds, self._free_in[target]) + seconds
        return max(self._free_out[source], self._free_in[target])

    def wait_seconds(self, source: str, target: str, now_seconds: float) -> float:
        return max(self._free_out[source], self._free_in[target], now_seconds) - now_seconds
