"""The first placement: filter, score, pick.

Prefill candidates are the ring's next three, the two that are believed to hold most of the
prompt, and the least busy one. Scoring all workers instead was within 2 % on a real trace, so
five are enough (DESIGN §5). Work that has to be done again is a cost to everyone behind, so
uncached tokens weigh more than queued ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.errors import Overloaded, Unavailable
from baton.ring import successors
from conductor.policy.snapshot import Decision, Query, Scored, Snapshot, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """``service_weight`` is what a token to compute costs in tokens of queue."""

    ring_candidates: int = 3
    holder_candidates: int = 2
    service_weight: float = 4.0
    max_requests_per_worker: int = 1024
    retry_after_seconds: float = 1.0


def place(snapshot: Snapshot, query: Query, config: PlacementConfig) -> Decision:
    """Raises Unavailable when there is no worker, Overloaded when none may take more."""
    decision = _choose_workers(snapshot, query, config)
    return replace(decision, store_hint=snapshot.stored(query.keys))


def _choose_workers(snapshot: Snapshot, query: Query, config: PlacementConfig) -> Decision:
    prefills = _eligible(snapshot.prefills, query)
    decodes = _eligible(snapshot.decodes, query)
    if not prefills and not decodes:
        raise Unavailable("no worker is ready")
    if not decodes:
        # A prefill worker has the same engine: slow is better than nothing.
        scores = _prefill_scores(snapshot, _with_room(prefills, config), query, config)
        chosen = _member(prefills, scores[0].worker)
        return Decision(None, chosen, "no decode worker is ready", (), scores)
    decode_scores = _decode_scores(snapshot, _with_room(decodes, config), query)
    decode = _member(decodes, decode_scores[0].worker)
    if not prefills:
        return Decision(None, decode, "no prefill worker is ready", (), decode_scores)
    scores = _prefill_scores(snapshot, _with_room(prefills, config), query, config)
    best = scores[0]
    reason = (
        f"{best.cached_blocks} of {len(query.keys)} blocks cached, "
        f"{best.queued_tokens} tokens queued, best of {len(scores)}"
    )
    return Decision(_member(prefills, best.worker), decode, reason, scores, decode_scores)


def ring_key(snapshot: Snapshot, query: Query) -> bytes:
    """The chain key at the first depth that few enough requests share (at most a quarter of a
    worker's fair part), since real traffic shares its first blocks; else the request's id."""
    limit = 1 / (4 * max(len(snapshot.prefills), 1))
    for key in query.keys:
        if snapshot.share(key) <= limit:
            return key
    return query.request_id.encode()


def _eligible(workers: Sequence[WorkerView], query: Query) -> list[WorkerView]:
    return [worker for worker in workers if worker.id not in query.excluded]


def _with_room(workers: Sequence[WorkerView], config: PlacementConfig) -> list[WorkerView]:
    room = [w for w in workers if w.num_requests < config.max_requests_per_worker]
    if not room:
        raise Overloaded(
            f"all {len(workers)} workers have {config.max_requests_per_worker} requests",
            retry_after_seconds=config.retry_after_seconds,
        )
    return room


def _prefill_scores(
    snapshot: Snapshot, workers: Sequence[WorkerView], query: Query, config: PlacementConfig
) -> tuple[Scored, ...]:
    """Best first; of equals, the one that comes first on the ring."""
    by_id = {worker.id: worker for worker in workers}
    ring = [WorkerId(i) for i in successors(tuple(sorted(by_id)), ring_key(snapshot, query))]
    cached = {worker: snapshot.cached_blocks(worker, query.keys) for worker in ring}
    holders = sorted((w for w in ring if cached[w]), key=lambda w: -cached[w])
    candidates = dict.fromkeys(
        [
            *islice(ring, config.ring_candidates),
            *holders[: config.holder_candidates],
            min(ring, key=lambda w: by_id[w].queued_tokens),
        ]
    )
    return _ranked(_score(by_id[w], cached[w], query, config) for w in candidates)


def _score(worker: WorkerView, cached: int, query: Query, config: PlacementConfig) -> Scored:
    cached_tokens = min(cached * worker.member.block_tokens, query.num_tokens - 1)
    service = query.num_tokens - cached_tokens
    score = worker.queued_tokens + config.service_weight * service
    return Scored(worker.id, score, cached, worker.queued_tokens)


def _decode_scores(
    snapshot: Snapshot, workers: Sequence[WorkerView], query: Query
) -> tuple[Scored, ...]:
    """Fewest requests for its size first, those without room for this one last."""
    needed = query.num_tokens + query.max_new_tokens
    ordered = successors(tuple(sorted(w.id for w in workers)), query.request_id.encode())
    by_id = {worker.id: worker for worker in workers}
    return _ranked(_decode_score(by_id[WorkerId(name)], needed) for name in ordered)


def _decode_score(worker: WorkerView, needed: int) -> Scored:
    num_blocks = max(worker.member.load.num_blocks, 1)
    free = worker.free_blocks_after(needed)
    full = 1000.0 if free < 0 else 0.0
    return Scored(worker.id, worker.num_requests + full - free / num_blocks, 0, 0)


def _ranked(scores: Iterable[Scored]) -> tuple[Scored, ...]:
    """Sorting is stable: of equals the first stays first."""
    return tuple(sorted(scores, key=lambda scored: scored.score))


def _member(workers: Sequence[WorkerView], worker_id: WorkerId) -> Member:
    return next(worker.member for worker in workers if worker.id == worker_id)
