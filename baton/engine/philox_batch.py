"""Random draws for a whole batch at once: a vectorized ``baton.core.philox.uniform``."""

import numpy as np
from numpy.typing import NDArray

from baton.core.philox import uniform

Words = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MAX_SINGLE_DRAWS = 16
"""Up to so many draws are computed one by one, which is then faster than a hundred calls of
NumPy."""


def uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """Return draws in [0, 1) with 53 bits, one for each pair of ``seeds[i]`` and
    ``positions[i]``."""
    if len(seeds) <= _MAX_SINGLE_DRAWS:
        return np.array([uniform(*each) for each in zip(seeds, positions, strict=True)])
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = (position & _MASK, position >> _HALF, np.zeros_like(seed), np.zeros_like(seed))
    high, low = _philox(counter, (seed & _MASK, seed >> _HALF))
    bits = (high >> np.uint64(5)) * np.uint64(67108864) + (low >> np.uint64(6))
    return bits.astype(np.float64) / 9007199254740992


def _philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Return the first two words of Philox4x32-10 for each counter and key. ``baton.core.philox``
    computes the same for a single pair."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1]
