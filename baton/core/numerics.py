"""Decides which workers compute bit-identical results, for clusters with the setting
``deterministic`` (docs/engine.md)."""

from collections.abc import Iterable, Sequence

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import WORKER_ROLES, WorkerState


def incompatible_workers(members: Iterable[Member]) -> frozenset[WorkerId]:
    """Return the workers that must get no requests, because their logits may differ in bits from
    those of the oldest worker. The result is empty if no worker is deterministic. It depends on
    ``members`` alone, so that all programs agree on it."""
    workers = _workers(members)
    if not any(worker.numerics_fingerprint for worker in workers):
        return frozenset()
    wanted = _oldest(workers).numerics_fingerprint
    return frozenset(worker.id for worker in workers if worker.numerics_fingerprint != wanted)


def incompatible_peer(
    members: Iterable[Member], own_id: WorkerId, fingerprint: str
) -> Member | None:
    """Return the oldest other worker if its numerics fingerprint differs from ``fingerprint``, the
    fingerprint of the worker ``own_id``, which is about to join. Return None if there is no
    conflict."""
    others = [worker for worker in _workers(members) if worker.id != own_id]
    if not others or not (fingerprint or any(worker.numerics_fingerprint for worker in others)):
        return None
    oldest = _oldest(others)
    return None if oldest.numerics_fingerprint == fingerprint else oldest


def _workers(members: Iterable[Member]) -> list[Member]:
    return [
        member
        for member in members
        if member.role in WORKER_ROLES and member.state is not WorkerState.GONE
    ]


def _oldest(workers: Sequence[Member]) -> Member:
    return min(workers, key=lambda worker: (worker.generation, worker.id))
