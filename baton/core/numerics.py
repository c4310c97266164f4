"""Which workers compute alike, where that is promised (``deterministic``, docs/engine.md)."""

from collections.abc import Iterable, Sequence

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState

WORKER_ROLES = (Role.PREFILL, Role.DECODE)


def incompatible_workers(members: Iterable[Member]) -> frozenset[WorkerId]:
    """Workers that get no requests: their logits might have other bits than those of the oldest
    one. Nobody, while nobody promises anything. Who knows the same members says the same."""
    workers = _workers(members)
    if not any(worker.arithmetic for worker in workers):
        return frozenset()
    wanted = _oldest(workers).arithmetic
    return frozenset(worker.id for worker in workers if worker.arithmetic != wanted)


def incompatible_peer(members: Iterable[Member], own: WorkerId, arithmetic: str) -> Member | None:
    """By whom worker ``own`` would be at odds, if it came with this arithmetic."""
    others = [worker for worker in _workers(members) if worker.id != own]
    if not others or not (arithmetic or any(worker.arithmetic for worker in others)):
        return None
    oldest = _oldest(others)
    return None if oldest.arithmetic == arithmetic else oldest


def _workers(members: Iterable[Member]) -> list[Member]:
    return [
        member
        for member in members
        if member.role in WORKER_ROLES and member.state is not WorkerState.GONE
    ]


def _oldest(workers: Sequence[Member]) -> Member:
    return min(workers, key=lambda worker: (worker.generation, worker.id))
