"""Checksums of stored blocks, by the algorithms that workers use."""

import numpy as np
import xxhash

from baton.core.kv_transfer import CHECKSUM_WSUM, CHECKSUM_XXH3

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def block_checksum(algorithm: str, data: memoryview | bytes) -> int | None:
    """Return the checksum of a block's bytes, as :mod:`baton.engine.checksum` does; None for an
    algorithm that the node doesn't know. This reads all bytes, so don't call it in the event
    loop."""
    if algorithm == CHECKSUM_XXH3:
        return xxhash.xxh3_64_intdigest(data)
    if algorithm == CHECKSUM_WSUM:
        if len(data) % 4:  # the last word is padded with zeros
            data = bytes(data) + bytes(-len(data) % 4)
        words = np.frombuffer(data, dtype="<i4").astype(np.int64).view(np.uint64)
        weights = np.arange(len(words), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        return int((words * (weights * _FACTOR)).sum(dtype=np.uint64))
    return None
