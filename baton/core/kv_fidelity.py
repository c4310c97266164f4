"""Decides which workers keep KV of the same fidelity (docs/kv-codecs.md)."""

from collections import defaultdict
from collections.abc import Iterable

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import WORKER_ROLES, WorkerState


def workers_with_other_codec(members: Iterable[Member]) -> frozenset[WorkerId]:
    """Return the workers that must get no requests, because their lossy codec differs from that of
    the oldest worker of the same model. Together they would serve a request from KV that has passed
    a codec which one of them doesn't know of, and would keep it under the keys of exact KV. The
    result depends on ``members`` alone, so that all programs agree on it."""
    by_model: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        if member.role in WORKER_ROLES and member.state is not WorkerState.GONE:
            by_model[member.model].append(member)
    differing: set[WorkerId] = set()
    for workers in by_model.values():
        if any(worker.kv_lossy_codec for worker in workers):
            oldest = min(workers, key=lambda worker: (worker.generation, worker.id))
            wanted = oldest.kv_lossy_codec
            differing.update(each.id for each in workers if each.kv_lossy_codec != wanted)
    return frozenset(differing)
