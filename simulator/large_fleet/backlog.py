"""The work queued at prefill workers, by deadline."""

import math

import numpy as np

from simulator.large_fleet.arrays import Floats, Ints, sums_by_group, sums_within_groups

NUM_BINS = 48


class DeadlineBins:
    """Divides time into bins of equal width. Bins are numbered from the start of the simulation; a
    backlog has the next :data:`NUM_BINS` of them."""

    def __init__(self, max_seconds: float) -> None:
        """Deadlines are at most ``max_seconds`` ahead."""
        self.width_seconds = max_seconds / (NUM_BINS - 2)
        self.first = 0

    def number(self, deadline_seconds: Floats) -> Ints:
        return np.floor(deadline_seconds / self.width_seconds).astype(np.int64)

    def index(self, numbers: Ints) -> Ints:
        """Return the positions of bins in a backlog. Past bins are at position 0."""
        return np.clip(numbers - self.first, 0, NUM_BINS - 1)

    def middles(self) -> Floats:
        """Return the time in the middle of each bin of a backlog, ``[NUM_BINS]``."""
        first = self.first + 0.5
        return np.arange(first, first + NUM_BINS - 0.5, dtype=np.float64) * self.width_seconds

    def advance(self, now_seconds: float) -> int:
        """Return how many bins have passed since the last call."""
        before, self.first = self.first, math.floor(now_seconds / self.width_seconds)
        return self.first - before


class PrefillBacklog:
    """``due_seconds[w, b]`` is the work that worker ``w`` has to do before it has computed all
    prompts with deadlines in bin ``b`` and before, in seconds. Earlier deadlines go first."""

    def __init__(self, num_workers: int) -> None:
        self.due_seconds: Floats = np.zeros((num_workers, NUM_BINS))

    @property
    def total_seconds(self) -> Floats:
        """All work of each worker, ``[num_workers]``."""
        return self.due_seconds[:, -1]

    def advance(self, seconds: float) -> None:
        self.due_seconds -= seconds
        np.maximum(self.due_seconds, 0.0, out=self.due_seconds)

    def pass_bins(self, count: int) -> None:
        """Treat the deadlines of the first ``count`` bins as those of the bin after them."""
        count = min(count, NUM_BINS - 1)
        if count:
            kept = NUM_BINS - count
            self.due_seconds[:, :kept] = self.due_seconds[:, count:].copy()
            self.due_seconds[:, kept:] = self.due_seconds[:, kept - 1 : kept]

    def add(self, workers: Ints, bins: Ints, seconds: Floats) -> tuple[Ints, Floats]:
        """Add a prompt per element. Return the workers that got prompts, each once, and the added
        work, ``[num_changed, NUM_BINS]``, in the form of ``due_seconds``."""
        changed, rows = np.unique(workers, return_inverse=True)
        by_bin = sums_by_group(rows * NUM_BINS + bins, seconds, len(changed) * NUM_BINS)
        added = np.cumsum(by_bin.reshape(-1, NUM_BINS), axis=1)
        self.due_seconds[changed] += added
        return changed, added

    def seconds_until_done(
        self, workers: Ints, bins: Ints, seconds: Floats, ready_seconds: Floats
    ) -> Floats:
        """Return the time until each prompt has been computed, if all are added now.
        ``ready_seconds`` is the time until a prompt can begin."""
        order = np.lexsort((bins, workers))
        own = sums_within_groups(workers[order], seconds[order])
        before = np.maximum(self.due_seconds[workers, bins], ready_seconds)[order]
        done = np.empty(len(workers))
        done[order] = before + own
        return done

    def clear(self, workers: Ints) -> None:
        self.due_seconds[workers] = 0.0
