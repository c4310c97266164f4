"""Where blocks lie in a simulated cluster, and how they travel."""

from collections.abc import Mapping, Sequence

from baton.core.ids import WorkerId
from conductor.approx_prefix_index import PrefixPopularity
from conductor.policy.snapshot import AnyBlockKey, LinkSpeed, PrefillView, StoredPrefix
from simulator.lru import HolderIndex, LruTier


class SimulatedCaches:
    """Each worker's device, and its host's store; also what the policies see of both. The mirror
    of a live conductor is milliseconds old, so here it is the truth."""

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
        self._owners = HolderIndex()
        self._heads = PrefixPopularity()

    def join(self, worker: WorkerId, host: str, reads: bool) -> None:
        """A new worker; its host's store may be new, too."""
        self._host_of[worker] = host
        self._devices[worker] = LruTier(self._device_blocks)
        self._nodes.setdefault(host, LruTier(self._node_blocks))
        if reads:
            self._prefills.setdefault(host, []).append(worker)

    def keep(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        """They were computed there, and published to its host's store."""
        self._devices[worker].use(keys)
        host = self._host_of[worker]
        came, went = self._nodes[host].use(keys)
        self._owners.add(host, came)
        self._owners.remove(host, went)

    def take_in(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> None:
        """They were handed over to it."""
        self._devices[worker].use(keys)

    def note_request(self, keys: Sequence[AnyBlockKey]) -> None:
        self._heads.record(keys)

    def leave(self, worker: WorkerId) -> None:
        """It died or went; its host's store outlives it."""
        self._gone.add(worker)
        self._devices[worker] = LruTier(self._devices[worker].num_blocks)

    def come_back(self, worker: WorkerId) -> None:
        self._gone.discard(worker)

    def on_device(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        return self._devices[worker].leading(keys)

    def on_host(self, host: str, keys: Sequence[AnyBlockKey]) -> int:
        return self._nodes[host].leading(keys)

    # -- CacheView -------------------------------------------------------------------------

    def local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        device = self._devices[view.id].leading(keys)
        return max(device, self._nodes[view.node].leading(keys))

    def holders(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        hosts = self._owners.best(keys, count + len(self._gone))
        there = (worker for host in hosts for worker in self._prefills.get(host, ()))
        return [worker for worker in there if worker not in self._gone][:count]

    def stored(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        depth = self._owners.deepest(keys)
        return StoredPrefix(self._owners.of(keys[depth - 1])[0], depth) if depth else None

    def share(self, key: AnyBlockKey) -> float:
        return self._heads.share(key)


class SimulatedNetwork:
    """One link in and one out per host; either carries one transfer after the other."""

    def __init__(self, hosts: Sequence[str], link: LinkSpeed) -> None:
        self._link = link
        self._free_in = dict.fromkeys(hosts, 0.0)
        self._free_out = dict.fromkeys(hosts, 0.0)

    def join(self, host: str) -> None:
        """If it is new."""
        self._free_in.setdefault(host, 0.0)
        self._free_out.setdefault(host, 0.0)

    def send(self, source: str, target: str, size_bytes: float, now_seconds: float) -> float:
        """When it will have arrived."""
        seconds = self._link.seconds(size_bytes)
        self._free_out[source] = max(now_seconds, self._free_out[source]) + seconds
        self._free_in[target] = max(now_seconds, self._free_in[target]) + seconds
        return max(self._free_out[source], self._free_in[target])

    def wait_seconds(self, source: str, target: str, now_seconds: float) -> float:
        return max(self._free_out[source], self._free_in[target], now_seconds) - now_seconds
