"""Which few prefill workers are worth scoring."""

import hashlib
from itertools import islice

from baton.hash_ring import ring_successors
from conductor.policy.snapshot import AnyBlockKey, PolicyQuery, PrefillView, Snapshot


def key_bytes(key: AnyBlockKey) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def ring_key(snapshot: Snapshot, query: PolicyQuery) -> bytes:
    """The chain key at the first depth that few enough requests share (at most a quarter of a
    worker's fair part), since real traffic shares its first blocks; else the session, else the
    request's id."""
    limit = 1 / (4 * max(len(snapshot.prefills), 1))
    for key in query.keys:
        if snapshot.cache.share(key) <= limit:
            return key_bytes(key)
    return (query.session or query.request_id).encode()


def candidates(
    snapshot: Snapshot, query: PolicyQuery, num_ring: int, num_holders: int, num_least: int
) -> list[PrefillView]:
    """The ring's next, those that hold most of the prompt, and one of the least loaded; of equals
    in score, who comes first here is taken. Which of the least loaded, the request's hash says, so
    that several conductors with the same old reports do not all flock to one. Who was excluded
    is no candidate."""
    pool = snapshot.prefills
    ring = ring_successors(pool.ids, ring_key(snapshot, query))
    able = (view.id for view in pool.least() if view.id not in query.excluded)
    least = list(islice(able, num_least))
    names = (
        *islice((name for name in ring if name not in query.excluded), num_ring),
        *snapshot.cache.holders(query.keys, num_holders),
        *([least[hash_to_index(query.request_id, len(least))]] if least else ()),
    )
    known = (name for name in dict.fromkeys(names) if name in pool)
    return [pool[name] for name in known if name not in query.excluded]


def hash_to_index(request_id: str, count: int) -> int:
    """A number in [0, count), always the same for a request."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % count
