"""Chooses the few workers that are worth scoring for a prompt."""

import hashlib
from collections.abc import Iterable
from itertools import islice

from baton.core.ids import WorkerId
from baton.placement.hash_ring import ring_successors
from baton.placement.prefix_popularity import first_unpopular_key
from conductor.policy.snapshot import (
    AnyBlockKey,
    PolicyQuery,
    Snapshot,
    WorkerPool,
    WorkerViewT,
)


def key_bytes(key: AnyBlockKey) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def ring_key(snapshot: Snapshot, query: PolicyQuery) -> bytes:
    """Return the key that is looked up on the hash ring: the prompt's
    ``first_unpopular_key`` or, if there is none, the session or,
    without a session, the request's id."""
    num_workers = len(snapshot.prefills) + len(snapshot.mixed)
    key = first_unpopular_key(query.keys, snapshot.cache.request_share, num_workers)
    return (query.session or query.request_id).encode() if key is None else key_bytes(key)


def candidates(
    snapshot: Snapshot,
    query: PolicyQuery,
    pool: WorkerPool[WorkerViewT],
    num_ring: int,
    num_holders: int,
    num_least: int,
) -> list[WorkerViewT]:
    """Return the candidates from ``pool``, without excluded workers: the first ``num_ring`` workers
    on the hash ring after :func:`ring_key`, up to ``num_holders`` workers that have most of the
    prompt cached, and one of the ``num_least`` least loaded workers. Callers break ties between
    equal scores by this order. Among the least loaded workers, a hash of the request's id selects
    one, so that several conductors with the same stale reports do not all choose the same
    worker."""
    ring: Iterable[str] = ring_successors(pool.ids, ring_key(snapshot, query))
    eligible = (view.id for view in pool.by_load() if view.id not in query.excluded)
    least: list[WorkerId] = list(islice(eligible, num_least))
    names = (
        *islice((name for name in ring if name not in query.excluded), num_ring),
        *snapshot.cache.workers_with_prefix(query.keys, num_holders),
        *([least[hash_to_index(query.request_id, len(least))]] if least else ()),
    )
    known = (name for name in dict.fromkeys(names) if name in pool)
    return [pool[name] for name in known if name not in query.excluded]


def hash_to_index(request_id: str, count: int) -> int:
    """Hash a request id to an index in [0, count). The same id always gets the same index."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count
