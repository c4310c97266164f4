"""Which prefixes a mock worker would have in its cache: names of blocks, least recently used."""

from array import array
from collections.abc import Iterable

import xxhash

from baton.core.request import RequestSpec

TOKEN_BYTES = 4


def block_hashes(spec: RequestSpec, block_tokens: int) -> tuple[int, ...]:
    """Of the full blocks of its tokens; each stands for itself and all before it."""
    data = array("I", spec.token_ids).tobytes()
    size = block_tokens * TOKEN_BYTES
    running = xxhash.xxh3_64(spec.tenant_salt)
    names = []
    for start in range(0, len(data) - size + 1, size):
        running.update(data[start : start + size])
        names.append(running.intdigest())
    return tuple(names)


class MockPrefixCache:
    """At most ``capacity`` blocks, some 100 bytes each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def held(self, names: Iterable[int]) -> int:
        """How many of them, from the first one on."""
        count = 0
        for name in names:
            if name not in self._names:
                break
            count += 1
        return count

    def keep(self, names: tuple[int, ...]) -> None:
        """They are the latest now, and of one prefix the first block goes last."""
        for name in reversed(names[: self._capacity]):
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > self._capacity:
            del self._names[next(iter(self._names))]
