"""How many lines of batches may be answered now. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.member import Member

BUSY_FRACTION = 0.5
"""Of the requests that this router takes: from then on all of it is for those who wait."""

MIN_FREE_BLOCK_FRACTION = 0.1
"""Of a decode worker's blocks: with fewer, answers under way need them to grow."""

MAX_CONCURRENT_BATCH_REQUESTS = 256
"""At once: each holds a body and an answer in memory."""


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """``inside`` are requests of others in this router, ``limit`` the most that it takes."""

    inside: int
    limit: int
    prefill: Sequence[Member]
    decode: Sequence[Member]
    draining: bool


def num_allowed_batch_requests(per_worker: int, running: int, business: RouterLoad) -> int:
    """``per_worker`` for each decode worker, and none while anybody else waits: at a worker, beyond
    those of the ``running`` lines, or soon at this router."""
    workers = [*business.prefill, *business.decode]
    if business.draining or not business.decode:
        return 0
    if business.inside >= BUSY_FRACTION * business.limit:
        return 0
    if sum(worker.load.waiting for worker in workers) > running:
        return 0
    if any(_is_full(worker) for worker in business.decode):
        return 0
    return min(per_worker * len(business.decode), MAX_CONCURRENT_BATCH_REQUESTS)


def _is_full(worker: Member) -> bool:
    load = worker.load
    return load.num_blocks > 0 and load.free_blocks < MIN_FREE_BLOCK_FRACTION * load.num_blocks
