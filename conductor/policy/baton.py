"""Baton's own placement: filter, score, pick.

Prefill candidates are the ring's next three, the two that hold most of the prompt, and one of the
least loaded. A candidate's score is its queue, what would have to come from a peer's store, and
``service_weight`` times what it would have to compute: work that is done again is a cost to
everyone behind. A candidate that would be late, or make others late, comes after all that would
not.

The decode worker is the one whose memory is the least promised. A request that it can't hold, or
that no candidate can serve in time, is refused at once: what would be late anyway must not make
others late. Long prompts are what does not fit, so under pressure they alone would be refused;
then shorter ones have to leave room for a long one, until both are let in equally often (trunk
reservation: Kelly, "Loss Networks", 1991).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from baton.errors import Invalid, Overloaded, Unavailable
from baton.hash_ring import ring_successors
from conductor.policy.candidates import candidates
from conductor.policy.decision import Decision, ScoredWorker
from conductor.policy.local_prefill import local_prefill_decision
from conductor.policy.prefill_work import prefill_work
from conductor.policy.queue_forecast import forecast_queue
from conductor.policy.snapshot import (
    DecodeView,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
    WorkerPool,
)

SLO_MISS_PENALTY = 1e3
"""Seconds; more than any queue that is let grow."""

IDLE_QUEUE_SECONDS = 1e-3
"""Who starts within them is idle, and an idle worker is the best there is: nobody is refused."""

MAX_MARGIN_SHARE = 0.25
"""Of what the first token may take."""


@dataclass(frozen=True, slots=True)
class BatonPolicyConfig:
    """``service_weight`` is what a second of computing costs in seconds of waiting.
    ``fair_advantage`` is how much more often short prompts may be let in than long ones.
    ``margin_seconds`` is by how much a first token is planned to come before its deadline."""

    ring_candidates: int = 3
    holder_candidates: int = 2
    least_candidates: int = 5
    decode_candidates: int = 4
    service_weight: float = 4.0
    fair_advantage: float = 0.02
    margin_seconds: float = 0.3
    admission: bool = True
    full_scan: bool = False


def place(snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig) -> Decision:
    """Raises Unavailable when there is no worker, Overloaded when none can meet the SLO, Invalid
    when none could ever hold the request."""
    decodes = _decode_scores(snapshot, query, config)
    stored = snapshot.cache.stored(query.keys)
    scores = _prefill_scores(snapshot, query, config, stored)
    if not decodes and not scores:
        raise Unavailable("no worker is ready")
    if not decodes:
        # A prefill worker has the same engine: slow is better than nothing.
        return _on_prefill_pool(scores, stored)
    if not scores:
        return _on_decode_pool(decodes, stored)
    if config.admission and not query.promised:
        _check_admission(snapshot, query, config, scores[0], decodes[0])
    best = scores[0]
    single = local_prefill_decision(snapshot, query, best, decodes[0], stored)
    if single is not None:
        return replace(single, prefill_scores=scores, decode_scores=decodes)
    return Decision(
        best.worker,
        decodes[0].worker,
        _reason(best, query, len(scores)),
        stored if best.fetched_blocks else None,
        best.service_seconds,
        best.queue_seconds + best.service_seconds,
        decodes[0].service_seconds,
        scores,
        decodes,
    )


def _on_prefill_pool(scores: tuple[ScoredWorker, ...], stored: StoredPrefix | None) -> Decision:
    best = scores[0]
    return Decision(
        None,
        best.worker,
        "no decode worker is ready",
        stored,
        best.service_seconds,
        best.queue_seconds + best.service_seconds,
        prefill_scores=scores,
    )


def _on_decode_pool(scores: tuple[ScoredWorker, ...], stored: StoredPrefix | None) -> Decision:
    best = scores[0]
    return Decision(
        None,
        best.worker,
        "no prefill worker is ready",
        stored,
        tbt_seconds=best.service_seconds,
        decode_scores=scores,
    )


def _reason(best: ScoredWorker, query: PolicyQuery, num_scored: int) -> str:
    return (
        f"{best.local_blocks} of {len(query.keys)} blocks at hand, {best.fetched_blocks} to fetch, "
        f"starts in {best.queue_seconds:.3f} s, computes {best.service_seconds:.3f} s, "
        f"best of {num_scored}"
    )


# -- prefill -------------------------------------------------------------------------------


def _prefill_scores(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig, stored: StoredPrefix | None
) -> tuple[ScoredWorker, ...]:
    """Best first; sorting is stable, so of equals the ring's next comes first."""
    if not len(snapshot.prefills):
        return ()
    views: Sequence[PrefillView] = (
        [view for view in snapshot.prefills if view.id not in query.excluded]
        if config.full_scan
        else candidates(
            snapshot,
            query,
            config.ring_candidates,
            config.holder_candidates,
            config.least_candidates,
        )
    )
    scored = [_prefill_score(snapshot, query, config, view, stored) for view in views]
    return tuple(sorted(scored, key=lambda each: each.score))


def _prefill_score(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    view: PrefillView,
    stored: StoredPrefix | None,
) -> ScoredWorker:
    now = snapshot.now_seconds
    work = prefill_work(snapshot, query, view, stored)
    own = view.cost.seconds(query.num_tokens)
    margin = min(config.margin_seconds, query.first_token_seconds * MAX_MARGIN_SHARE)
    deadline = now + query.first_token_seconds + own - margin
    then = forecast_queue(view, now, now + work.fetch_seconds, deadline, work.compute_seconds)
    late = max(then.done_seconds - deadline, 0.0) if view.measured else 0.0
    wait = view.queue_seconds(now) + work.fetch_seconds
    score = wait + config.service_weight * work.compute_seconds
    if view.measured:
        score += SLO_MISS_PENALTY * ((late > 0) + then.num_harmed)
    queue = max(then.done_seconds - now - work.compute_seconds, 0.0)
    return ScoredWorker(
        view.id, score, queue, work.compute_seconds, work.local_blocks, work.fetched_blocks, late
    )


# -- decode --------------------------------------------------------------------------------


def _decode_scores(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig
) -> tuple[ScoredWorker, ...]:
    """By what share of the memory will be promised; who would be too slow comes last. Of equals,
    the ring's next after the request: two conductors think of different workers."""
    pool = snapshot.decodes

    def able(names: Iterable[str]) -> Iterator[str]:
        fits = (name for name in names if pool[name].capacity_tokens >= query.num_tokens)
        return (name for name in fits if name not in query.excluded)

    ring = ring_successors(pool.ids, query.request_id.encode())
    least = (view.id for view in pool.least())
    names = dict.fromkeys((*islice(able(ring), 1), *islice(able(least), config.decode_candidates)))
    if not names and len(pool):
        _check_size(pool, query)
    scored = [_decode_score(snapshot, query, pool[name]) for name in names]
    return tuple(sorted(scored, key=lambda each: each.score))


def _check_size(pool: WorkerPool[DecodeView], query: PolicyQuery) -> None:
    """Raises Invalid for what nobody could hold, excluded or not."""
    most = max(view.capacity_tokens for view in pool)
    if most < query.num_tokens:
        raise Invalid(
            f"the request has {query.num_tokens} tokens, and the largest decode worker has memory "
            f"for {most}",
            param="prompt",
            code="context_length_exceeded",
        )


def _decode_score(snapshot: Snapshot, query: PolicyQuery, view: DecodeView) -> ScoredWorker:
    gap = view.step_seconds(1, query.num_tokens)
    late = max(gap - query.token_gap_seconds, 0.0) if view.measured else 0.0
    promised = view.promised_tokens + _needed_tokens(snapshot, query)
    score = promised / view.capacity_tokens + SLO_MISS_PENALTY * (late > 0)
    return ScoredWorker(view.id, score, 0.0, gap, late_seconds=late)


def _needed_tokens(snapshot: Snapshot, query: PolicyQuery) -> int:
    return query.num_tokens + int(min(snapshot.answer_tokens, query.max_new_tokens))


# -- admission -----------------------------------------------------------------------------


def _check_admission(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    best: ScoredWorker,
    writer: ScoredWorker,
) -> None:
    """Raises Overloaded, with the time after which it may be otherwise."""
    decode = snapshot.decodes[writer.worker]
    if writer.late_seconds and decode.num_requests:
        raise Overloaded(
            f"tokens would come every {writer.service_seconds:.3f} s, which is more than "
            f"{query.token_gap_seconds:.3f} s",
            retry_after_seconds=1.0,
        )
    if best.late_seconds and best.queue_seconds > IDLE_QUEUE_SECONDS:
        raise Overloaded(
            f"the first token would come {best.late_seconds:.2f} s late",
            retry_after_seconds=max(best.late_seconds, 0.1),
        )
    if best.score >= SLO_MISS_PENALTY and not best.late_seconds:
        raise Overloaded("requests that were let in before would be late", retry_after_seconds=1.0)
    needed = _needed_tokens(snapshot, query)
    wait = _wait_seconds(snapshot, query, decode, needed)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker has room for {max(decode.free_tokens, 0)} tokens, "
            f"and {needed} are needed",
            retry_after_seconds=max(wait, 0.1),
        )
    if snapshot.admitted.advantage(query.num_tokens) <= config.fair_advantage:
        return
    spare = snapshot.admitted.large_tokens
    wait = _wait_seconds(snapshot, query, decode, needed + spare)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker keeps its last {spare} tokens for a longer prompt",
            retry_after_seconds=max(wait, 0.1),
        )


def _wait_seconds(snapshot: Snapshot, query: PolicyQuery, decode: DecodeView, needed: int) -> float:
    """By how much the KV would have to wait for room longer than even a short answer can make up
    for. Promised tokens get free evenly, all of them within one answer's time."""
    deficit = needed - decode.free_tokens
    if deficit <= 0 or not decode.num_requests:
        return 0.0
    step = decode.step_seconds()
    drain = deficit / max(decode.promised_tokens, 1) * step * snapshot.answer_tokens
    spare = max(query.token_gap_seconds - step, 0.0) * snapshot.short_answer_tokens
    return drain - spare
