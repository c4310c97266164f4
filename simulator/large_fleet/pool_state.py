"""Which workers of a pool run, and which get requests."""

import numpy as np

from simulator.large_fleet.arrays import Bools, Floats, Ints


class PoolState:
    """The state of each worker of one pool, ``[num_workers]``: ``is_up`` (the worker computes),
    ``is_known`` (conductors place requests on it; they notice a failure later than it happens),
    ``is_wanted`` (it was started and not retired), and the time since which it has been up."""

    def __init__(self, num_workers: int, num_started: int) -> None:
        self.num_workers = num_workers
        self.is_wanted: Bools = np.arange(num_workers) < num_started
        self.is_up: Bools = self.is_wanted.copy()
        self.is_known: Bools = self.is_wanted.copy()
        self.up_since_seconds: Floats = np.full(num_workers, -np.inf)
        self.known: Ints = np.flatnonzero(self.is_known)
        """The workers on which requests are placed."""
        self.wanted: Ints = np.flatnonzero(self.is_wanted)

    def start(self, workers: Ints, now_seconds: float) -> None:
        """Make workers serve that are new or back."""
        self.is_wanted[workers] = self.is_up[workers] = self.is_known[workers] = True
        self.up_since_seconds[workers] = now_seconds
        self._update()

    def fail(self, workers: Ints) -> None:
        """Stop workers; until :meth:`notice_failure`, requests are still placed on them."""
        self.is_up[workers] = False

    def notice_failure(self, workers: Ints) -> None:
        """Place no more requests on those of the workers that are down."""
        self.is_known[workers[~self.is_up[workers]]] = False
        self._update()

    def retire(self, workers: Ints) -> None:
        """Place no more requests on workers; they finish what they have."""
        self.is_wanted[workers] = self.is_known[workers] = False
        self._update()

    def _update(self) -> None:
        self.known = np.flatnonzero(self.is_known)
        self.wanted = np.flatnonzero(self.is_wanted)
