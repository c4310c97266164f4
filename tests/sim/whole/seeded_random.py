"""The only source of randomness of a run, fully determined by one seed."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class SeededRandom:
    """A cheap source of random numbers that is fully determined by its seed. Every draw takes one
    number from the generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.number = np.random.Generator(np.random.PCG64(seed)).random
        """Return a number in [0, 1)."""

    def below(self, count: int) -> int:
        return int(self.number() * count)

    def between(self, least: int, most: int) -> int:
        """Return an integer from ``least`` to ``most``, both included."""
        return least + int(self.number() * (most - least + 1))

    def uniform(self, least: float, most: float) -> float:
        return least + self.number() * (most - least)

    def happens(self, probability: float) -> bool:
        return self.number() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.number() * len(options))]
