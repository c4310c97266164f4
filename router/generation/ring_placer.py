"""Places requests by a hash ring, without a conductor. The router does this while no conductor
answers. All routers have the same ring."""

from collections.abc import Sequence

from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.errors import Unavailable
from baton.hash_ring import ring_successors
from router.generation.model_workers import ModelWorkers

RING_KEY_BLOCKS = 8
"""The prefill worker is picked by the key of the prompt's eighth block or, if the prompt is
shorter, of its last full block. That key depends on all blocks before it. With 16 tokens per block,
eight blocks reach beyond the system prompts that all requests share, and end before conversations
diverge."""

LOAD_SLACK = 1.25
"""No worker is picked that has more requests than ``LOAD_SLACK`` times the mean plus
``MIN_LOAD_ALLOWANCE`` (consistent hashing with bounded loads)."""

MIN_LOAD_ALLOWANCE = 4
"""Added to the bound on a worker's requests, since differences of a few requests are noise."""

RING_POLICY = "ring"


class RingPlacer:
    """Places requests by a hash ring. A placement depends only on the query, on which workers are
    ready, and on the loads of these workers. The ring has the prefill workers and the mixed
    workers: a request whose place is a mixed worker's stays there, also for its answer."""

    def __init__(self, workers: ModelWorkers) -> None:
        self._workers = workers

    async def place(self, query: PlacementQuery) -> Placement:
        prefills = self._candidates(Role.PREFILL, query)
        decodes = self._candidates(Role.DECODE, query)
        mixed = self._candidates(Role.MIXED, query)
        if mixed:
            computing = [*prefills, *mixed] if prefills and decodes else mixed
            chosen = pick_with_bounded_load(computing, _ring_key(query))
            if chosen.role is Role.MIXED:
                return _build_placement(None, chosen, "ring: a mixed worker")
        if not decodes and not prefills:
            if query.adapter is not None:
                raise Unavailable(f"no worker has loaded the adapter {query.adapter.name}")
            raise Unavailable(f"no worker is ready for model {self._workers.model!r}")
        request = query.request_id.encode()
        if not decodes:
            return _build_placement(
                None, pick_with_bounded_load(prefills, request), "ring: no decode worker"
            )
        decode = pick_with_bounded_load(decodes, request)
        if not prefills:
            return _build_placement(None, decode, "ring: no prefill worker")
        return _build_placement(pick_with_bounded_load(prefills, _ring_key(query)), decode, "ring")

    def _candidates(self, role: Role, query: PlacementQuery) -> list[Member]:
        ready = self._workers.ready_members(role, query.variant)
        return [
            member
            for member in ready
            if member.id not in query.excluded
            and (query.adapter is None or member.has_adapter(query.adapter.digest))
        ]


def pick_with_bounded_load(members: Sequence[Member], key: bytes) -> Member:
    """Return the first member on the ring after ``key`` that is not much busier than the mean."""
    by_id: dict[str, Member] = {member.id: member for member in members}
    num_requests = {
        name: member.load.running + member.load.waiting for name, member in by_id.items()
    }
    limit = LOAD_SLACK * sum(num_requests.values()) / len(num_requests) + MIN_LOAD_ALLOWANCE
    order = ring_successors(tuple(sorted(by_id)), key)
    return next(by_id[name] for name in order if num_requests[name] <= limit)


def _ring_key(query: PlacementQuery) -> bytes:
    """Return the key that is looked up on the ring. Requests have the same key if their prompts
    begin with the same :data:`RING_KEY_BLOCKS` blocks. Requests without a full block are spread by
    session, or by request id if they have no session."""
    if not query.block_keys:
        return (query.session or query.request_id).encode()
    return query.block_keys[min(len(query.block_keys), RING_KEY_BLOCKS) - 1]


def _build_placement(prefill: Member | None, decode: Member, reason: str) -> Placement:
    first = _worker_ref(prefill) if prefill is not None else None
    return Placement(first, _worker_ref(decode), reason, policy=RING_POLICY)


def _worker_ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.address, member.generation, member.framed_address)
