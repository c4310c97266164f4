"""Consistent hashing with virtual nodes: the same ring in every process."""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import uhashring

POINTS_PER_WORKER = 256
"""With 16 workers, load varies by about 6 % between them."""


def successors(ids: tuple[str, ...], key: bytes) -> Iterator[str]:
    """Every id once, in the order of the ring from ``key`` on. A join or leave moves about
    one key in len(ids). ``ids`` are sorted, so that equal sets share one ring."""
    assert list(ids) == sorted(ids), "the ring is found by its sorted ids"
    for entry in _ring(ids).range(key):
        yield entry["nodename"]


@lru_cache(maxsize=64)
def _ring(ids: tuple[str, ...]) -> uhashring.HashRing:
    return uhashring.HashRing(list(ids), vnodes=POINTS_PER_WORKER, hash_fn=_position)


def _position(key: bytes | str) -> int:
    data = key.encode() if isinstance(key, str) else key
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
