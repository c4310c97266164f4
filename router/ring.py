"""The router's own placement, for when no conductor answers: a ring that every router shares."""

from collections.abc import Sequence

from baton.core.handoff import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement
from baton.core.states import Role
from baton.errors import Unavailable
from baton.ring import successors
from router.cluster import Cluster
from router.placement import PlaceQuery

KEY_DEPTH = 8
"""Blocks whose chain key picks the prefill worker: 128 tokens of 16 go beyond the system
prompts that all requests share, and stay below where conversations part."""

SLACK = 1.25
"""No worker is picked whose load exceeds this many times the mean (bounded loads)."""

FREE_REQUESTS = 4
"""What a worker may have beyond the mean before its load counts: small numbers are noise."""

POLICY = "ring"


class RingPlacer:
    """Deterministic: equal members and queries give equal placements."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def place(self, query: PlaceQuery) -> Placement:
        prefills = self._candidates(Role.PREFILL, query)
        decodes = self._candidates(Role.DECODE, query)
        if not decodes and not prefills:
            raise Unavailable("no worker is ready")
        request = query.request_id.encode()
        if not decodes:
            return _placement(None, pick(prefills, request), "ring: no decode worker")
        decode = pick(decodes, request)
        if not prefills:
            return _placement(None, decode, "ring: no prefill worker")
        return _placement(pick(prefills, _prefix(query)), decode, "ring")

    def _candidates(self, role: Role, query: PlaceQuery) -> list[Member]:
        ready = self._cluster.ready(role)
        return [member for member in ready if member.id not in query.excluded]


def pick(members: Sequence[Member], key: bytes) -> Member:
    """The first on the ring after ``key`` that is not much busier than the others."""
    by_id: dict[str, Member] = {member.id: member for member in members}
    busy = {name: member.load.running + member.load.waiting for name, member in by_id.items()}
    limit = SLACK * sum(busy.values()) / len(busy) + FREE_REQUESTS
    order = successors(tuple(sorted(by_id)), key)
    return next(by_id[name] for name in order if busy[name] <= limit)


def _prefix(query: PlaceQuery) -> bytes:
    """What requests that begin alike have in common; short ones are spread."""
    if not query.block_keys:
        return (query.session or query.request_id).encode()
    return query.block_keys[min(len(query.block_keys), KEY_DEPTH) - 1]


def _placement(prefill: Member | None, decode: Member, reason: str) -> Placement:
    first = _ref(prefill) if prefill is not None else None
    return Placement(first, _ref(decode), reason, policy=POLICY)


def _ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.address, member.generation, member.line)
