"""Random generators that are determined by a seed."""

import numpy as np

from baton.errors import Invalid


def seeded_generator(seed: int) -> np.random.Generator:
    """Return a generator that draws the same numbers for the same seed. Raises Invalid for a
    negative seed."""
    if seed < 0:
        raise Invalid(f"the seed is {seed}; it must not be negative", param="seed")
    return np.random.default_rng(seed)
