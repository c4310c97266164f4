"""Consistent hashing with virtual nodes. Every process computes the same ring."""

import hashlib
from bisect import bisect
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

import uhashring

POINTS_PER_WORKER = 256
"""Virtual nodes per worker. With 16 workers, load varies by about 6 % between them."""

RING_SIZE = 2**64
"""Positions are 8-byte integers."""


def ring_successors(ids: tuple[str, ...], key: bytes) -> Iterator[str]:
    """Yield every id once, in the order of the ring, starting at the position of ``key``. When an
    id is added or removed, about one key in len(ids) gets another first id. ``ids`` must be sorted,
    so that equal sets of ids share one cached ring."""
    positions, names = _ring(ids)
    start = bisect(positions, _position(key))
    seen: set[str] = set()
    for index in chain(range(start, len(names)), range(start)):
        name = names[index]
        if name not in seen:
            seen.add(name)
            yield name
            if len(seen) == len(ids):
                return


def ring_shares(ids: tuple[str, ...]) -> dict[str, float]:
    """Return the share of all keys whose first successor is each id. The shares add up to 1.
    ``ids`` must be sorted. Computing a new ring takes about 2 ms per id."""
    if not ids:
        return {}
    positions, names = _ring(ids)
    sizes = dict.fromkeys(ids, 0)
    # The keys from one point up to the next belong to the latter; the ring closes at 2^64.
    previous = positions[-1] - RING_SIZE
    for position, name in zip(positions, names, strict=True):
        sizes[name] += position - previous
        previous = position
    return {name: size / RING_SIZE for name, size in sizes.items()}


@lru_cache(maxsize=64)
def _ring(ids: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Return the positions of the virtual nodes in ascending order, and the id at each position."""
    assert list(ids) == sorted(ids), "ids must be sorted"
    ring = uhashring.HashRing(list(ids), vnodes=POINTS_PER_WORKER, hash_fn=_position)
    points = ring.get_points()
    return [position for position, _ in points], [name for _, name in points]


def _position(key: bytes | str) -> int:
    data = key.encode() if isinstance(key, str) else key
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
