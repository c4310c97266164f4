"""The prefix cache of a mock worker: an LRU cache of block hashes, without data."""

from array import array
from collections.abc import Iterable

import xxhash

from baton.core.request import RequestSpec

TOKEN_BYTES = 4


def block_hashes(spec: RequestSpec, block_tokens: int) -> tuple[int, ...]:
    """Return the hashes of the full blocks of a request's tokens. Each hash covers its block and
    all blocks before it."""
    data = array("I", spec.token_ids).tobytes()
    size = block_tokens * TOKEN_BYTES
    running = xxhash.xxh3_64(spec.tenant_salt + spec.adapter_digest)
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        running.update(data[start : start + size])
        hashes.append(running.intdigest())
    return tuple(hashes)


class MockPrefixCache:
    """An LRU cache of at most ``capacity`` block hashes. An entry takes some 100 bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def num_leading_cached(self, hashes: Iterable[int]) -> int:
        """Return how many leading blocks are cached."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += 1
        return count

    def add(self, hashes: tuple[int, ...]) -> None:
        """Add a prefix's blocks, or mark them as used. The first block of the prefix is evicted
        last."""
        for block_hash in reversed(hashes[: self._capacity]):
            self._hashes.pop(block_hash, None)
            self._hashes[block_hash] = None
        while len(self._hashes) > self._capacity:
            del self._hashes[next(iter(self._hashes))]
