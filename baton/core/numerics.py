"""Decides which workers compute bit-identical results, for clusters with the setting
``deterministic`` (docs/engine.md)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS


def incompatible_workers(members: Iterable[Member]) -> frozenset[WorkerId]:
    """Return the workers that must get no requests, because their logits may differ in bits from
    those of the oldest worker of the same model. No worker of a model is in the result if none of
    them is deterministic. The result depends on ``members`` alone, so that all programs agree on
    it."""
    by_model: dict[str, list[Member]] = defaultdict(list)
    for worker in _workers(members):
        by_model[worker.model].append(worker)
    return frozenset(
        worker.id for workers in by_model.values() for worker in _differing_workers(workers)
    )


def _differing_workers(workers: Sequence[Member]) -> Iterator[Member]:
    if any(worker.numerics_fingerprint for worker in workers):
        wanted = _oldest(workers).numerics_fingerprint
        yield from (worker for worker in workers if worker.numerics_fingerprint != wanted)


def incompatible_peer(
    members: Iterable[Member], own_id: WorkerId, model: str, fingerprint: str
) -> Member | None:
    """Return the oldest other worker of ``model`` if its numerics fingerprint differs from
    ``fingerprint``, the fingerprint of the worker ``own_id``, which is about to join. Return None
    if there is no conflict."""
    others = [
        worker for worker in _workers(members) if worker.id != own_id and worker.model == model
    ]
    if not others or not (fingerprint or any(worker.numerics_fingerprint for worker in others)):
        return None
    oldest = _oldest(others)
    return None if oldest.numerics_fingerprint == fingerprint else oldest


def _workers(members: Iterable[Member]) -> list[Member]:
    return [
        member
        for member in members
        if member.role in WORKER_KINDS and member.state is not WorkerState.GONE
    ]


def _oldest(workers: Sequence[Member]) -> Member:
    return min(workers, key=lambda worker: (worker.generation, worker.id))
