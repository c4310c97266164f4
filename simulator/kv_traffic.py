"""The movement of KV in a simulated cluster, and how long it takes."""

from baton.core.ids import WorkerId
from conductor.policy.decision import Decision
from simulator.cluster_config import ClusterConfig
from simulator.event_queue import EventQueue
from simulator.fleet import SimulatedFleet
from simulator.request import SimulatedRequest


class KvTraffic:
    """Simulates fetches of cached prefixes and KV transfers between workers. Times are in seconds
    of virtual time."""

    def __init__(
        self, config: ClusterConfig, block_tokens: int, events: EventQueue, fleet: SimulatedFleet
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._events = events
        self._fleet = fleet

    def fetch_prefix(self, job: SimulatedRequest, reader: WorkerId, decision: Decision) -> None:
        """Fetch the cached prefix of the job's prompt to the worker ``reader``. This sets the job's
        ``num_computed`` to the number of tokens in the prefix, and its ``ready_at_seconds`` to the
        time at which their KV has arrived.

        Blocks on the device are used in place, and blocks in the host's store are loaded. Blocks in
        another host's store (``decision.fetch_source``) are fetched over the network if
        ``peer_fetch`` is set and fetching them is faster than computing them. The prompt's last
        token is always computed."""
        now, block = self._events.now_seconds, self._block_tokens
        max_cached = job.num_prompt_tokens - 1
        size, caches = self._config.kv_bytes_per_token, self._fleet.caches
        cached = min(caches.num_device_blocks(reader, job.keys) * block, max_cached)
        job.tier_tokens["device"], job.ready_at_seconds = cached, now
        host = self._fleet.host_of[reader]
        stored = min(caches.num_host_blocks(host, job.keys) * block, max_cached)
        if stored > cached:
            seconds = (stored - cached) * size / self._config.link.host_bytes_per_second
            job.tier_tokens["dram"], job.ready_at_seconds = stored - cached, now + seconds
            cached = stored
        reuse = decision.fetch_source
        if reuse is not None and self._config.peer_fetch and reuse.node != host:
            in_peer = min(caches.num_host_blocks(reuse.node, job.keys) * block, max_cached)
            more = in_peer - cached
            wait = self._fleet.network.wait_seconds(reuse.node, host, now)
            fetch = wait + self._config.link.seconds(more * size)
            if more > 0 and fetch < self._fleet.prefill_cost(reader).seconds(more, cached):
                done = self._fleet.network.send(reuse.node, host, more * size, now)
                job.tier_tokens["peer"] = more
                job.ready_at_seconds, cached = max(job.ready_at_seconds, done), in_peer
        job.num_computed = cached

    def reload(self, job: SimulatedRequest) -> float:
        """Reload a preempted request's KV from the host's store. Returns the time at which the KV
        is loaded."""
        size = job.context_tokens * self._config.kv_bytes_per_token
        return self._events.now_seconds + size / self._config.link.host_bytes_per_second

    def transfer(self, job: SimulatedRequest, num_tokens: int) -> float:
        """Transfer the KV of the last ``num_tokens`` tokens of a prompt to the decode worker,
        except for tokens that are in its prefix cache. Returns the time at which the transfer is
        complete."""
        assert job.prefill is not None and job.decode is not None
        caches, host_of = self._fleet.caches, self._fleet.host_of
        cached = caches.num_device_blocks(job.decode, job.keys) * self._block_tokens
        caches.cache_imported(job.decode, job.keys)
        missing = min(num_tokens, job.num_prompt_tokens - cached)
        size = max(missing, 1) * self._config.kv_bytes_per_token
        now = self._events.now_seconds
        return self._fleet.network.send(host_of[job.prefill], host_of[job.decode], size, now)
