"""The router's own placement, for when no conductor answers: a ring that every router shares."""

from collections.abc import Sequence

from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement
from baton.core.states import Role
from baton.errors import Unavailable
from baton.hash_ring import ring_successors
from router.generation.cluster import Cluster
from router.generation.placement import PlacementQuery

RING_KEY_BLOCKS = 8
"""Blocks whose chain key picks the prefill worker: 128 tokens of 16 go beyond the system
prompts that all requests share, and stay below where conversations part."""

LOAD_SLACK = 1.25
"""No worker is picked whose load exceeds this many times the mean (bounded loads)."""

MIN_LOAD_ALLOWANCE = 4
"""What a worker may have beyond the mean before its load counts: small numbers are noise."""

RING_POLICY = "ring"


class RingPlacer:
    """Deterministic: equal members and queries give equal placements."""

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
        ready = self._cluster.ready(role)
        return [member for member in ready if member.id not in query.excluded]


def pick_with_bounded_load(members: Sequence[Member], key: bytes) -> Member:
    """The first on the ring after ``key`` that is not much busier than the others."""
    by_id: dict[str, Member] = {member.id: member for member in members}
    busy = {name: member.load.running + member.load.waiting for name, member in by_id.items()}
    limit = LOAD_SLACK * sum(busy.values()) / len(busy) + MIN_LOAD_ALLOWANCE
    order = ring_successors(tuple(sorted(by_id)), key)
    return next(by_id[name] for name in order if busy[name] <= limit)


def _ring_key(query: PlacementQuery) -> bytes:
    """What requests that begin alike have in common; short ones are spread."""
    if not query.block_keys:
        return (query.session or query.request_id).encode()
    return query.block_keys[min(len(query.block_keys), RING_KEY_BLOCKS) - 1]


def _build_placement(prefill: Member | None, decode: Member, reason: str) -> Placement:
    first = _worker_ref(prefill) if prefill is not None else None
    return Placement(first, _worker_ref(decode), reason, policy=RING_POLICY)


def _worker_ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.address, member.generation, member.line)
