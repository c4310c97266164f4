"""Places requests by a hash ring, without a conductor. The router does this while no conductor
answers. All routers have the same ring."""

from collections.abc import Callable, Sequence

from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.worker_kinds import WORKER_KINDS, WorkerKind
from baton.errors import Unavailable
from baton.placement.hash_ring import ring_successors
from baton.placement.prefix_popularity import PrefixPopularity, first_unpopular_key
from router.generation.model_workers import ModelWorkers

LOAD_SLACK = 1.25
"""No worker is picked that has more requests than ``LOAD_SLACK`` times the mean plus
``MIN_LOAD_ALLOWANCE`` (consistent hashing with bounded loads)."""

MIN_LOAD_ALLOWANCE = 4
"""Added to the bound on a worker's requests, since differences of a few requests are noise."""

RING_POLICY = "ring"


class RingPlacer:
    """Places requests by a hash ring. A placement depends only on the query, on the queries before
    it, on which workers are ready, and on the loads of these workers. The ring has the
    workers that compute prompts: a request whose place is that of a worker that serves alone stays
    there, also for its answer. A prompt has the same key as at the conductor
    (``prefix_popularity``), so it goes to the worker to which the conductor sends it while
    all are idle, and which has its prefix cached."""

    def __init__(
        self, workers: ModelWorkers, num_in_flight: Callable[[WorkerRef], int] = lambda worker: 0
    ) -> None:
        """``num_in_flight`` returns how many requests of this router a worker has now, also those
        that are not in its last load report."""
        self._workers = workers
        self._num_in_flight = num_in_flight
        self._popularity = PrefixPopularity()

    async def place(self, query: PlacementQuery) -> Placement:
        decodes = self._candidates(lambda kind: kind.imports_kv, query)
        alone = self._candidates(lambda kind: kind.serves_alone, query)
        needs_decode = query.max_new_tokens > 1
        computing = alone
        if decodes or not (needs_decode and alone):
            computing = self._candidates(lambda kind: kind.computes_prompts, query)
        if not decodes and not computing:
            if query.adapter is not None:
                raise Unavailable(f"no worker has loaded the adapter {query.adapter.name}")
            raise Unavailable(f"no worker is ready for model {self._workers.model!r}")
        request = query.request_id.encode()
        if not computing:
            return _build_placement(None, self._pick(decodes, request), "ring: no prefill worker")
        chosen = self._pick(computing, self._ring_key(query))
        if WORKER_KINDS[chosen.role].serves_alone:
            return _build_placement(None, chosen, f"ring: a {chosen.role.value} worker")
        if not decodes:
            return _build_placement(chosen, chosen, "ring: no decode worker")
        if not needs_decode:
            return _build_placement(chosen, chosen, "ring: the answer has one token")
        return _build_placement(chosen, self._pick(decodes, request), "ring")

    def _candidates(self, can: Callable[[WorkerKind], bool], query: PlacementQuery) -> list[Member]:
        ready = self._workers.ready_workers(can, query.variant)
        return [
            member
            for member in ready
            if member.id not in query.excluded
            and (query.adapter is None or member.has_adapter(query.adapter.digest))
        ]

    def _ring_key(self, query: PlacementQuery) -> bytes:
        """Return the key that is looked up on the ring: the same as
        :func:`conductor.policy.candidates.ring_key`."""
        popularity = self._popularity
        num_workers = len(self._workers.ready_workers(lambda kind: kind.computes_prompts))
        key = first_unpopular_key(query.block_keys, popularity.request_share, num_workers)
        popularity.record(query.block_keys)
        return (query.session or query.request_id).encode() if key is None else key

    def _pick(self, members: Sequence[Member], key: bytes) -> Member:
        """Return the first member on the ring after ``key`` that is not much busier than the
        mean."""
        by_id: dict[str, Member] = {member.id: member for member in members}
        num_requests = {
            name: max(
                member.load.running + member.load.waiting, self._num_in_flight(_worker_ref(member))
            )
            for name, member in by_id.items()
        }
        limit = LOAD_SLACK * sum(num_requests.values()) / len(num_requests) + MIN_LOAD_ALLOWANCE
        order = ring_successors(tuple(sorted(by_id)), key)
        return next(by_id[name] for name in order if num_requests[name] <= limit)


def _build_placement(prefill: Member | None, decode: Member, reason: str) -> Placement:
    first = _worker_ref(prefill) if prefill is not None else None
    return Placement(first, _worker_ref(decode), reason, policy=RING_POLICY)


def _worker_ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.address, member.generation, member.framed_address)
