"""Which few prefill workers are worth scoring."""

from itertools import islice

from baton.ring import successors
from conductor.policy.fleet import Key, PrefillView, Query, Snapshot


def key_bytes(key: Key) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def ring_key(snapshot: Snapshot, query: Query) -> bytes:
    """The chain key at the first depth that few enough requests share (at most a quarter of a
    worker's fair part), since real traffic shares its first blocks; else the session, else the
    request's id."""
    limit = 1 / (4 * max(len(snapshot.prefills), 1))
    for key in query.keys:
        if snapshot.cache.share(key) <= limit:
            return key_bytes(key)
    return (query.session or query.request_id).encode()


def candidates(
    snapshot: Snapshot, query: Query, num_ring: int, num_holders: int, num_least: int
) -> list[PrefillView]:
    """The ring's next, those that hold most of the prompt, and the least loaded; of equals in
    score, who comes first here is taken. Who was excluded is no candidate."""
    pool = snapshot.prefills
    ring = successors(pool.ids, ring_key(snapshot, query))
    least = (view.id for view in pool.least())
    names = (
        *islice((name for name in ring if name not in query.excluded), num_ring),
        *snapshot.cache.holders(query.keys, num_holders),
        *islice((name for name in least if name not in query.excluded), num_least),
    )
    return [pool[name] for name in dict.fromkeys(names) if name not in query.excluded]
