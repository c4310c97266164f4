"""Decides how many batch requests may run now, as a pure function of the load."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.member import Member
from router.limits import MAX_CONCURRENT_BATCH_REQUESTS

BUSY_FRACTION = 0.5
"""While the router's load is at least this fraction of its limit, no batch request is started."""

MIN_FREE_BLOCK_FRACTION = 0.1
"""While a decode worker has less than this fraction of its blocks free, no batch request is
started: the worker's running requests may need the free blocks."""


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """The load as this router sees it. ``num_requests`` is the number of its answers in progress,
    not counting those for batch requests; ``limit`` is the maximum number of answers in
    progress. ``decode`` are the workers that write answers, ``prefill`` the others."""

    num_requests: int
    limit: int
    prefill: Sequence[Member]
    decode: Sequence[Member]
    draining: bool


def num_allowed_batch_requests(requests_per_worker: int, running: int, load: RouterLoad) -> int:
    """Return how many batch requests may run: ``requests_per_worker`` for each worker of
    ``load.decode``, but at most ``MAX_CONCURRENT_BATCH_REQUESTS``. Return 0 while one of them is
    nearly full, while this router is busy or draining, or while more requests wait at workers than
    there are ``running`` batch requests (so some of those that wait are not batch requests)."""
    workers = [*load.prefill, *load.decode]
    if load.draining or not load.decode:
        return 0
    if load.num_requests >= BUSY_FRACTION * load.limit:
        return 0
    if sum(worker.load.waiting for worker in workers) > running:
        return 0
    if any(_is_full(worker) for worker in load.decode):
        return 0
    return min(requests_per_worker * len(load.decode), MAX_CONCURRENT_BATCH_REQUESTS)


def _is_full(worker: Member) -> bool:
    load = worker.load
    return load.num_blocks > 0 and load.free_blocks < MIN_FREE_BLOCK_FRACTION * load.num_blocks
