"""Philox4x32-10 (Salmon et al., SC'11): random numbers as a pure function of (key, counter).

So a request's random draws depend on its seed and the token's position alone: not on its batch, its
worker, or how often it was preempted. test_philox.py checks this module against
known answers from the authors' Random123 library. It needs only the standard library.
"""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Return four 32-bit words that are determined by a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return a uniform draw in [0, 1) with 53 bits, for the token at ``position`` of a sequence."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((position & _MASK, position >> 32, 0, 0), key)
    return ((high >> 5) * 67108864 + (low >> 6)) / 9007199254740992
