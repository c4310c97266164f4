"""The router's own placement while no conductor answers, by a hash ring that is the same in all
routers."""

from collections.abc import Sequence

from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.errors import Unavailable
from baton.hash_ring import ring_successors
from router.generation.cluster import Cluster

RING_KEY_BLOCKS = 8
"""The key of the prompt's block with this number (from 1), which covers all blocks before it, picks
the prefill worker. With 16 tokens per block, these 128 tokens reach beyond the system prompts that
all requests share, and end before conversations diverge."""

LOAD_SLACK = 1.25
"""No worker is picked whose load exceeds the mean by more than this factor (bounded loads)."""

MIN_LOAD_ALLOWANCE = 4
"""A worker may always have this many requests more than the mean: small differences are noise."""

RING_POLICY = "ring"


class RingPlacer:
    """Places by a hash ring. Deterministic: equal members and queries give equal placements."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def place(self, query: PlacementQuery) -> Placement:
        prefills = self._candidates(Role.PREFILL, query)
        decodes = self._candidates(Role.DECODE, query)
        if not decodes and not prefills:
            raise Unavailable("no worker is ready")
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
        ready = self._cluster.ready_members(role)
        return [member for member in ready if member.id not in query.excluded]


def pick_with_bounded_load(members: Sequence[Member], key: bytes) -> Member:
    """Return the first member on the ring after ``key`` that is not much busier than the others."""
    by_id: dict[str, Member] = {member.id: member for member in members}
    num_requests = {
        name: member.load.running + member.load.waiting for name, member in by_id.items()
    }
    limit = LOAD_SLACK * sum(num_requests.values()) / len(num_requests) + MIN_LOAD_ALLOWANCE
    order = ring_successors(tuple(sorted(by_id)), key)
    return next(by_id[name] for name in order if num_requests[name] <= limit)


def _ring_key(query: PlacementQuery) -> bytes:
    """Return a key that requests with the same beginning share; short prompts are spread."""
    if not query.block_keys:
        return (query.session or query.request_id).encode()
    return query.block_keys[min(len(query.block_keys), RING_KEY_BLOCKS) - 1]


def _build_placement(prefill: Member | None, decode: Member, reason: str) -> Placement:
    first = _worker_ref(prefill) if prefill is not None else None
    return Placement(first, _worker_ref(decode), reason, policy=RING_POLICY)


def _worker_ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.address, member.generation, member.framed_address)
