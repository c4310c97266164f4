"""The workers of a simulated cluster, with their hosts, caches and network."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.cost import PrefillCost
from baton.core.ids import WorkerId
from baton.core.prefill_order import PREFILL_ORDERS
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from conductor.policy.snapshot import DecodeView, MixedView, PrefillView, WorkerView
from simulator.caches import SimulatedCaches, SimulatedNetwork
from simulator.cluster_config import ClusterConfig
from simulator.decode import SimulatedDecodeWorker
from simulator.event_queue import EventQueue
from simulator.host_cores import SharedCores
from simulator.mixed import MixedWorkerLimits, SimulatedMixedWorker
from simulator.prefill import SimulatedPrefillWorker
from simulator.request import SimulatedRequest
from simulator.step_cost import WorkerCosts

AnsweringWorker = SimulatedDecodeWorker | SimulatedMixedWorker

RequestCallback = Callable[[SimulatedRequest], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCallbacks:
    """The functions that workers call. A prefill worker calls ``on_last_chunk`` when it starts a
    prompt's last chunk, and ``on_prefilled`` when the prompt has been computed. A decode worker
    calls ``on_room`` when it has reserved memory for a request, and ``on_answered`` when the answer
    is complete. A mixed worker calls ``on_prefilled_in_batch`` and ``on_answered``."""

    on_last_chunk: RequestCallback
    on_prefilled: RequestCallback
    on_room: RequestCallback
    on_answered: RequestCallback
    on_prefilled_in_batch: RequestCallback


class SimulatedFleet:
    """All workers that were ever started. ``crashed`` maps each worker that is down to the time at
    which its crash is detected; ``retired`` contains the workers that get no more requests."""

    def __init__(
        self,
        config: ClusterConfig,
        block_tokens: int,
        events: EventQueue,
        callbacks: WorkerCallbacks,
    ) -> None:
        self._config = config
        self._events = events
        self._callbacks = callbacks
        self.crashed: dict[WorkerId, float] = {}
        self.retired: set[WorkerId] = set()
        self.prefills = [self._new_prefill_worker(i) for i in range(config.num_prefill)]
        self.mixed_by_id = {
            each.id: each for each in map(self._new_mixed_worker, range(config.num_mixed))
        }
        self.decodes: list[AnsweringWorker] = [
            *map(self._new_decode_worker, range(config.num_decode)),
            *self.mixed_by_id.values(),
        ]
        self.prefill_by_id = {worker.id: worker for worker in self.prefills}
        self.decode_by_id = {worker.id: worker for worker in self.decodes}
        self._num_hosts = config.num_hosts or len(self.ids)
        self.host_of = {worker: f"h{i % self._num_hosts}" for i, worker in enumerate(self.ids)}
        self._cores_of_host: dict[str, SharedCores] = {}
        for each in self.ids:
            self._share_cores(each)
        device = max(config.device_tokens // block_tokens, 1)
        node = max(config.node_tokens // block_tokens, 1)
        self.caches = SimulatedCaches(
            self.host_of, [*self.prefill_by_id, *self.mixed_by_id], device, node
        )
        self._block_tokens = block_tokens
        for answering in self.decode_by_id:
            self._resize_device(answering)
        self.network = SimulatedNetwork(list(self.host_of.values()), config.link)

    @property
    def ids(self) -> list[WorkerId]:
        return [*self.prefill_by_id, *self.decode_by_id]

    def worker(self, worker: WorkerId) -> SimulatedPrefillWorker | AnsweringWorker:
        return self.prefill_by_id.get(worker) or self.decode_by_id[worker]

    def decode_worker(self, worker: WorkerId) -> SimulatedDecodeWorker:
        """Return a worker of the decode pool."""
        found = self.decode_by_id[worker]
        assert isinstance(found, SimulatedDecodeWorker)
        return found

    def is_prefill(self, worker: WorkerId) -> bool:
        return worker in self.prefill_by_id

    def is_mixed(self, worker: WorkerId) -> bool:
        return worker in self.mixed_by_id

    def add_worker(self, role: Role) -> WorkerId:
        """Add a worker, on its own host unless ``num_hosts`` is configured."""
        number = len(self.host_of)
        host = f"h{number % self._num_hosts}" if self._config.num_hosts else f"h{number}"
        worker: SimulatedPrefillWorker | AnsweringWorker
        is_prefill = WORKER_KINDS[role].computes_prompts
        if is_prefill:
            worker = self._new_prefill_worker(len(self.prefills))
            self.prefills.append(worker)
            self.prefill_by_id[worker.id] = worker
        else:
            worker = self._new_decode_worker(len(self.decodes))
            self.decodes.append(worker)
            self.decode_by_id[worker.id] = worker
        self.host_of[worker.id] = host
        self._share_cores(worker.id)
        self.caches.add_worker(worker.id, host, is_prefill)
        self._resize_device(worker.id)
        self.network.add_host(host)
        return worker.id

    def costs(self, worker: WorkerId) -> WorkerCosts:
        """Return the costs and the KV capacity of a decode or a mixed worker."""
        return self._config.mixed_costs if self.is_mixed(worker) else self._config.decode_costs

    def prefill_cost(self, worker: WorkerId) -> PrefillCost:
        return self._config.prefill_cost if self.is_prefill(worker) else self.costs(worker).prefill

    def prefill_view(self, worker: WorkerId) -> PrefillView:
        return PrefillView(worker, self.prefill_cost(worker), self.host_of[worker])

    def decode_view(self, worker: WorkerId) -> DecodeView:
        costs, host = self.costs(worker), self.host_of[worker]
        reads = costs.prefill if self._config.allow_local_prefill else None
        return DecodeView(worker, costs.decode, costs.kv_capacity_tokens, host, prefill_cost=reads)

    def view(self, worker: WorkerId) -> WorkerView:
        """Return a new view of a worker without load."""
        if self.is_prefill(worker):
            return self.prefill_view(worker)
        decode = self.decode_view(worker)
        return MixedView(self.prefill_view(worker), decode) if self.is_mixed(worker) else decode

    def check_idle(self) -> None:
        """Raise AssertionError if a worker still has requests."""
        busy = [each.id for each in self.prefills if not each.is_idle]
        busy += [each.id for each in self.decodes if not each.is_idle]
        assert not busy, f"{busy} have requests after the end"

    def check_integrity(self) -> None:
        """Raise AssertionError if a worker's counters of tokens and memory don't match its
        requests."""
        for prefill in self.prefills:
            prefill.check_integrity()
        for decode in self.decodes:
            decode.check_integrity()

    def _share_cores(self, worker: WorkerId) -> None:
        """Let a worker compute on its host's cores, if workers share them."""
        if speeds := self._config.shared_speeds:
            host = self.host_of[worker]
            shared = self._cores_of_host.setdefault(host, SharedCores(self._events, speeds))
            self.worker(worker).cores = shared

    def _resize_device(self, worker: WorkerId) -> None:
        if not self.is_prefill(worker):
            tokens = self.costs(worker).kv_capacity_tokens
            if tokens != self._config.device_tokens:
                self.caches.resize_device(worker, max(tokens // self._block_tokens, 1))

    def _new_prefill_worker(self, number: int) -> SimulatedPrefillWorker:
        return SimulatedPrefillWorker(
            WorkerId(f"p{number}"),
            self._events,
            self._config.prefill_cost,
            PREFILL_ORDERS[self._config.prefill_order],
            step_tokens=self._config.step_tokens,
            capacity_tokens=self._config.device_tokens,
            on_last_chunk=self._callbacks.on_last_chunk,
            on_done=self._callbacks.on_prefilled,
        )

    def _new_decode_worker(self, number: int) -> SimulatedDecodeWorker:
        costs = self._config.decode_costs
        return SimulatedDecodeWorker(
            WorkerId(f"d{number}"),
            self._events,
            costs.decode,
            costs.prefill,
            capacity_tokens=costs.kv_capacity_tokens,
            max_batch=self._config.max_batch,
            on_room=self._callbacks.on_room,
            on_done=self._callbacks.on_answered,
        )

    def _new_mixed_worker(self, number: int) -> SimulatedMixedWorker:
        config, costs = self._config, self._config.mixed_costs
        block = config.device_block_tokens
        return SimulatedMixedWorker(
            WorkerId(f"m{number}"),
            self._events,
            costs.step,
            MixedWorkerLimits(
                block_tokens=block,
                capacity_blocks=max(costs.kv_capacity_tokens // block, 1),
                step_tokens=config.mixed_tokens,
                max_requests=config.max_batch,
            ),
            on_prefilled=self._callbacks.on_prefilled_in_batch,
            on_done=self._callbacks.on_answered,
        )
