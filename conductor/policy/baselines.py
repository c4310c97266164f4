"""Reimplements the placement policies of other systems, as published, for comparison.

Each policy is a pure function, like Baton's own policy. State that a policy needs (the round-robin
turn, a tree of placed prompts) is in the snapshot. Only the two variants of Mooncake's policy
(``min_ttft`` and ``min_ttft_no_reject``) may decide to fetch KV from another worker's store.
"""

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar

from baton.core.ids import WorkerId
from baton.errors import Overloaded
from baton.placement.hash_ring import ring_successors
from conductor.policy.candidates import key_bytes, ring_key
from conductor.policy.decision import Decision
from conductor.policy.kv_transfer_time import fetch_seconds
from conductor.policy.snapshot import (
    DecodeView,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
    WorkerPool,
)

PoolViewT = TypeVar("PoolViewT", PrefillView, DecodeView)

PlacementPolicy = Callable[[Snapshot, PolicyQuery], Decision]

CHWBL_LOAD_FACTOR = 1.25
"""KubeAI's default (``meanLoadPercentage: 125``)."""

MATCH_THRESHOLD = 0.3
IMBALANCE_REQUESTS, IMBALANCE_RATIO = 64, 1.5
"""Defaults of SGLang's router (``--cache-threshold``, ``--balance-abs-threshold``,
``--balance-rel-threshold``)."""

OVERLAP_WEIGHT = 1.0
"""Dynamo's default (``--kv-overlap-score-weight``)."""

BALANCING_THRESHOLD = 1.3
"""Mooncake's ``kvcache_balancing_threshold``: a remote prefix is fetched if it is more than this
many times as long as the local one."""


def random(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose both workers uniformly at random, by a hash of the decision's number."""
    prefill = _draw(snapshot.prefills, snapshot.num_placed, "prefill")
    return _pair(snapshot, query, prefill, _draw(snapshot.decodes, snapshot.num_placed, "decode"))


def round_robin(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    prefills, decodes, turn = snapshot.prefills, snapshot.decodes, snapshot.num_placed
    prefill = prefills[prefills.ids[turn % len(prefills)]]
    return _pair(snapshot, query, prefill, decodes[decodes.ids[turn % len(decodes)]])


def least_work(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose the prefill worker with the least predicted work in its queue, and the decode worker
    with the fewest tokens of KV."""
    return _pair(snapshot, query, next(snapshot.prefills.by_load()), _least_context(snapshot))


def power_of_two(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose the less loaded of two random workers (Mitzenmacher, 2001). Load is counted as in
    vLLM's and SGLang's routers: queued tokens for prefill, running requests for decode."""
    turn = snapshot.num_placed
    prefill = min(_two(snapshot.prefills, turn, "prefill"), key=lambda view: view.queued_tokens)
    decode = min(_two(snapshot.decodes, turn, "decode"), key=lambda view: view.num_requests)
    return _pair(snapshot, query, prefill, decode)


def session_hash(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose the prefill worker and the decode worker by a hash of the session, so that all
    requests of a session go to the same two workers while the pools stay the same. If the request
    has no session, hash its :func:`~conductor.policy.candidates.ring_key` instead: the first of its
    block keys that only a few requests share or, if there is no such key, its id."""
    key = query.session.encode() or ring_key(snapshot, query)
    prefills, decodes = snapshot.prefills, snapshot.decodes
    digest = _digest(key)
    prefill = prefills[prefills.ids[digest % len(prefills)]]
    return _pair(snapshot, query, prefill, decodes[decodes.ids[digest % len(decodes)]])


def consistent_hash(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose the next prefill worker on the hash ring after the key of the prompt's first block,
    and the decode worker with the fewest tokens of KV."""
    prefill = next(ring_successors(snapshot.prefills.ids, _first_block(query)))
    return _pair(snapshot, query, snapshot.prefills[prefill], _least_context(snapshot))


def chwbl(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Consistent hashing with bounded loads (Mirrokni et al., 2018) of the prompt's first block, as
    in KubeAI's PrefixHash: choose the next prefill worker on the hash ring whose number of
    requests, including this one, is at most 1.25 times the mean, rounded up. The decode worker is
    the one with the fewest tokens of KV."""
    prefills = snapshot.prefills
    mean = (sum(view.num_requests for view in prefills) + 1) / len(prefills)
    for name in ring_successors(prefills.ids, _first_block(query)):
        if prefills[name].num_requests + 1 <= math.ceil(CHWBL_LOAD_FACTOR * mean):
            return _pair(snapshot, query, prefills[name], _least_context(snapshot))
    return _pair(snapshot, query, _fewest(prefills), _least_context(snapshot))


def cache_aware(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """SGLang's router: choose the prefill worker that has the longest prefix of the prompt cached,
    if that prefix is long enough and the prefill workers' numbers of requests are balanced enough;
    otherwise choose the prefill worker with the fewest requests. The decode worker is always the
    one with the fewest requests."""
    prefills = snapshot.prefills
    requests = [view.num_requests for view in prefills]
    spread = max(requests) - min(requests)
    chosen = _fewest(prefills)
    if spread <= IMBALANCE_REQUESTS or max(requests) <= IMBALANCE_RATIO * min(requests):
        holders = snapshot.cache.workers_with_prefix(query.keys, 1)
        for holder in (name for name in holders if name in prefills):
            blocks = snapshot.cache.num_local_blocks(prefills[holder], query.keys)
            if blocks > MATCH_THRESHOLD * len(query.keys):
                chosen = prefills[holder]
    return _pair(snapshot, query, chosen, _fewest(snapshot.decodes))


def kv_overlap(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Dynamo's KV router at temperature 0: choose the prefill worker with the lowest weighted
    number of blocks to prefill, including queued blocks, and the decode worker with the fewest
    active blocks."""

    def cost(view: PrefillView) -> tuple[float, str]:
        blocks = (view.queued_tokens + _new_tokens(snapshot, query, view)) / snapshot.block_tokens
        return OVERLAP_WEIGHT * blocks, view.id

    return _pair(snapshot, query, min(snapshot.prefills, key=cost), _least_context(snapshot))


def min_ttft(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Algorithm 1 of the Mooncake paper (Qin et al., FAST '25): choose the prefill worker with the
    lowest predicted TTFT (queue, transfer and prefill), and the decode worker with the fewest
    tokens of KV. Raises Overloaded if the predicted TTFT or inter-token latency misses the SLO."""
    stored = snapshot.cache.longest_stored_prefix(query.keys)
    options = [_mooncake_option(snapshot, query, view, stored) for view in snapshot.prefills]
    ttft, _, prefill, reuse = min(options, key=lambda option: option[:2])
    decode = _least_context(snapshot)
    allowed = query.ttft_slo_seconds + prefill.cost.seconds(query.num_tokens)
    itl = decode.step_seconds(1, query.num_tokens)
    if not query.must_admit and (ttft > allowed or itl > query.itl_slo_seconds):
        raise Overloaded(
            f"the predicted TTFT is {ttft:.2f} s (allowed: {allowed:.2f} s), and the predicted "
            f"inter-token latency is {itl:.3f} s (allowed: {query.itl_slo_seconds:.3f} s)",
            retry_after_seconds=1.0,
        )
    return _pair(snapshot, query, prefill, decode, reuse)


def min_ttft_no_reject(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """Choose the same workers as :func:`min_ttft`, but never reject the request."""
    stored = snapshot.cache.longest_stored_prefix(query.keys)
    options = [_mooncake_option(snapshot, query, view, stored) for view in snapshot.prefills]
    _, _, prefill, reuse = min(options, key=lambda option: option[:2])
    return _pair(snapshot, query, prefill, _least_context(snapshot), reuse)


def new_tokens_times_batch(snapshot: Snapshot, query: PolicyQuery) -> Decision:
    """LMetric: choose the prefill worker with the lowest product of its tokens to prefill
    (including queued tokens) and its number of requests, and the decode worker with the fewest
    requests."""

    def cost(view: PrefillView) -> tuple[float, str]:
        tokens = view.queued_tokens + _new_tokens(snapshot, query, view)
        return tokens * (view.num_requests + 1), view.id

    return _pair(snapshot, query, min(snapshot.prefills, key=cost), _fewest(snapshot.decodes))


BASELINES: dict[str, PlacementPolicy] = {
    rule.__name__: rule
    for rule in (
        random,
        round_robin,
        least_work,
        power_of_two,
        session_hash,
        consistent_hash,
        chwbl,
        cache_aware,
        kv_overlap,
        min_ttft,
        min_ttft_no_reject,
        new_tokens_times_batch,
    )
}

# -- parts ---------------------------------------------------------------------------------


def _pair(
    snapshot: Snapshot,
    query: PolicyQuery,
    prefill: PrefillView,
    decode: DecodeView,
    reuse: StoredPrefix | None = None,
) -> Decision:
    """Build the decision, with the predictions that the load tracker needs."""
    local = snapshot.cache.num_local_blocks(prefill, query.keys)
    blocks = max(local, reuse.num_blocks if reuse is not None else 0)
    cached = min(blocks * snapshot.block_tokens, query.num_tokens - 1)
    seconds = prefill.cost.seconds(query.num_tokens - cached, cached)
    queue = prefill.queue_seconds(snapshot.now_seconds)
    return Decision(
        prefill.id,
        decode.id,
        f"{local} of {len(query.keys)} blocks cached",
        reuse,
        seconds,
        queue + seconds,
        decode.step_seconds(1, query.num_tokens),
    )


def _mooncake_option(
    snapshot: Snapshot, query: PolicyQuery, view: PrefillView, stored: StoredPrefix | None
) -> tuple[float, WorkerId, PrefillView, StoredPrefix | None]:
    most, block = query.num_tokens - 1, snapshot.block_tokens
    local = snapshot.cache.num_local_blocks(view, query.keys)
    queue = view.queue_seconds(snapshot.now_seconds)
    if stored is None or stored.num_blocks <= local * BALANCING_THRESHOLD:
        cached = min(local * block, most)
        return queue + view.cost.seconds(query.num_tokens - cached, cached), view.id, view, None
    cached = min(stored.num_blocks * block, most)
    moved = cached - min(local * block, most)
    transfer = fetch_seconds(snapshot.link, query, view, moved * snapshot.kv_bytes_per_token)
    compute = view.cost.seconds(query.num_tokens - cached, cached)
    return queue + transfer + compute, view.id, view, stored


def _new_tokens(snapshot: Snapshot, query: PolicyQuery, view: PrefillView) -> int:
    local = snapshot.cache.num_local_blocks(view, query.keys)
    return max(query.num_tokens - local * snapshot.block_tokens, 1)


def _least_context(snapshot: Snapshot) -> DecodeView:
    return min(snapshot.decodes, key=lambda view: (view.context_tokens, view.id))


def _fewest(pool: WorkerPool[PoolViewT]) -> PoolViewT:
    return min(pool, key=lambda view: (view.num_requests, view.id))


def _first_block(query: PolicyQuery) -> bytes:
    return key_bytes(query.keys[0]) if query.keys else query.request_id.encode()


def _digest(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def _draw(pool: WorkerPool[PoolViewT], turn: int, salt: str) -> PoolViewT:
    return pool[pool.ids[_digest(f"{salt} {turn}".encode()) % len(pool)]]


def _two(pool: WorkerPool[PoolViewT], turn: int, salt: str) -> tuple[PoolViewT, PoolViewT]:
    """Draw two different workers, or one worker twice if the pool has only one."""
    first = _digest(f"{salt} {turn}".encode()) % len(pool)
    other = 1 + _digest(f"{salt} {turn} other".encode()) % max(len(pool) - 1, 1)
    return pool[pool.ids[first]], pool[pool.ids[(first + other) % len(pool)]]
