"""Baton's own placement policy: filter, score, pick.

Prefill candidates are the next three workers on the hash ring, the two workers that have most of
the prompt cached, and one of the least loaded workers. A candidate's score is its queueing time,
plus the time to fetch blocks from a peer's store, plus ``service_weight`` times the prefill time:
recomputing a prefix delays every request behind it in the queue. Candidates that would miss the
TTFT deadline, or would make queued requests miss theirs, rank after all others.

The decode worker is the one with the lowest projected KV usage among those that meet the ITL SLO.
If it can prefill the prompt at a lower cost, it serves the whole request
(:mod:`conductor.policy.local_prefill`). A cluster may also have mixed workers, each of which serves
whole requests (:mod:`conductor.policy.mixed`).

A request that does not fit on the decode worker, or that no candidate can serve in time, is
rejected at once: a request that would miss its SLO anyway must not make others miss theirs. Under
memory pressure, only long prompts do not fit, so only they would be rejected. To be fair, shorter
prompts must then leave memory for a long prompt until short and long prompts are admitted nearly
equally often (trunk reservation: Kelly, "Loss Networks", 1991).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from baton.core.placement import ScoredWorker
from baton.errors import Overloaded, Unavailable
from baton.placement.hash_ring import ring_successors
from conductor.policy.candidates import candidates
from conductor.policy.config import (
    IDLE_QUEUE_SECONDS,
    MAX_UNMEASURED_TOKENS,
    SLO_MISS_PENALTY,
    BatonPolicyConfig,
)
from conductor.policy.decision import Decision
from conductor.policy.local_prefill import local_prefill_decision
from conductor.policy.memory import check_size, fits, needed_tokens, wait_seconds
from conductor.policy.mixed import mixed_scores
from conductor.policy.prefill_work import (
    first_token_deadline,
    predicted_lateness,
    prefill_work,
)
from conductor.policy.queue_forecast import forecast_queue
from conductor.policy.snapshot import (
    DecodeView,
    PolicyQuery,
    PrefillView,
    Snapshot,
    StoredPrefix,
)


def place(snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig) -> Decision:
    """Place a request. Raises Unavailable if there is no worker, Overloaded if no worker can meet
    the SLO or the KV does not fit into free memory, and Invalid if the request does not fit the
    memory of any decode worker."""
    stored = snapshot.cache.longest_stored_prefix(query.keys)
    mixed = mixed_scores(snapshot, query, config, stored)
    decodes = _decode_scores(snapshot, query, config)
    if not (mixed or decodes):
        check_size([*snapshot.decodes, *(view.decode for view in snapshot.mixed)], query)
    scores = _prefill_scores(snapshot, query, config, stored)
    pair_cost = _pair_cost(snapshot, query, scores, decodes)
    if mixed and mixed[0].score < pair_cost:
        decision = _on_mixed_worker(snapshot, query, config, mixed, stored)
        reason = decision.reason + _compared_with_pair(mixed[0], scores, decodes, pair_cost)
        return replace(decision, reason=reason, prefill_scores=scores, decode_scores=decodes)
    if not decodes and not scores:
        raise Unavailable("no worker is ready")
    if not scores:
        return _on_decode_pool(decodes, stored)
    best, compared = scores[0], _compared_with_mixed(mixed, pair_cost)
    if not decodes or not query.needs_decode:
        # Prefill workers have the same engine and can decode, only more slowly.
        if config.admission and not query.must_admit and not query.needs_decode:
            _check_first_token(snapshot, query, best)
        cause = "no decode worker is ready" if query.needs_decode else "the answer has one token"
        return Decision(
            best.worker,
            best.worker,
            f"{cause}: {_reason(best, query, len(scores))}{compared}",
            stored if best.fetched_blocks else None,
            best.service_seconds,
            best.queue_seconds + best.service_seconds,
            prefill_scores=scores,
            decode_scores=decodes,
            mixed_scores=mixed,
        )
    if config.admission and not query.must_admit:
        decode = snapshot.decodes[decodes[0].worker]
        _check_admission(snapshot, query, config, scores[0], decodes[0], decode)
    local = local_prefill_decision(snapshot, query, best, decodes[0], stored)
    if local is not None:
        return replace(
            local,
            reason=local.reason + compared,
            prefill_scores=scores,
            decode_scores=decodes,
            mixed_scores=mixed,
        )
    return Decision(
        best.worker,
        decodes[0].worker,
        _reason(best, query, len(scores)) + compared,
        stored if best.fetched_blocks else None,
        best.service_seconds,
        best.queue_seconds + best.service_seconds,
        decodes[0].service_seconds,
        scores,
        decodes,
        mixed,
    )


def _pair_cost(
    snapshot: Snapshot,
    query: PolicyQuery,
    prefills: Sequence[ScoredWorker],
    decodes: Sequence[ScoredWorker],
) -> float:
    """Return the cost of the best pair of a prefill and a decode worker, computed like the score of
    a mixed worker; infinity if there is no pair. An answer of one token needs no decode worker."""
    if prefills and not query.needs_decode:
        return prefills[0].score
    if not (prefills and decodes):
        return math.inf
    decode = decodes[0]
    answer_tokens = min(snapshot.answer_tokens, query.max_new_tokens)
    pair = prefills[0].score + answer_tokens * decode.service_seconds
    if decode.late_seconds or decode.score > 1:
        pair += SLO_MISS_PENALTY
    return pair


def _compared_with_pair(
    mixed: ScoredWorker,
    prefills: Sequence[ScoredWorker],
    decodes: Sequence[ScoredWorker],
    pair_cost: float,
) -> str:
    if not (prefills and decodes):
        return ""
    pair = f"{prefills[0].worker} and {decodes[0].worker}"
    return f"; its cost is {mixed.score:.3f} s, that of {pair} would be {pair_cost:.3f} s"


def _compared_with_mixed(mixed: Sequence[ScoredWorker], pair_cost: float) -> str:
    if not mixed:
        return ""
    best = mixed[0]
    return (
        f"; its cost is {pair_cost:.3f} s, that of the mixed worker {best.worker} would be "
        f"{best.score:.3f} s"
    )


def _on_mixed_worker(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    scores: tuple[ScoredWorker, ...],
    stored: StoredPrefix | None,
) -> Decision:
    best = scores[0]
    view = snapshot.mixed[best.worker]
    itl = view.itl_seconds(1, view.decode.held_tokens(query.attended_tokens(query.num_tokens)))
    if config.admission and not query.must_admit:
        late = max(itl - query.itl_slo_seconds, 0.0) if view.decode.is_measured else 0.0
        decode = replace(best, service_seconds=itl, late_seconds=late)
        needed = view.decode.held_tokens(needed_tokens(snapshot, query))
        if wait_seconds(snapshot, query, view.decode, needed) > 0:
            best = replace(best, score=0.0)  # the penalty is for the wait, not for other requests
        _check_admission(snapshot, query, config, best, decode, view.decode)
    return Decision(
        None,
        best.worker,
        f"mixed worker: {_reason(best, query, len(scores))}",
        stored if best.fetched_blocks else None,
        best.service_seconds,
        best.queue_seconds + best.service_seconds,
        itl,
        mixed_scores=scores,
    )


def _on_decode_pool(scores: tuple[ScoredWorker, ...], stored: StoredPrefix | None) -> Decision:
    best = scores[0]
    return Decision(
        None,
        best.worker,
        "no prefill worker is ready",
        stored,
        itl_seconds=best.service_seconds,
        decode_scores=scores,
    )


def _reason(best: ScoredWorker, query: PolicyQuery, num_scored: int) -> str:
    return (
        f"{best.local_blocks} of {len(query.keys)} blocks cached, {best.fetched_blocks} to fetch, "
        f"starts in {best.queue_seconds:.3f} s, prefill takes {best.service_seconds:.3f} s, "
        f"best of {num_scored}"
    )


# -- prefill -------------------------------------------------------------------------------


def _prefill_scores(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig, stored: StoredPrefix | None
) -> tuple[ScoredWorker, ...]:
    """Score the prefill candidates, best first. Sorting is stable, so among equal scores the next
    worker on the ring comes first."""
    if not len(snapshot.prefills):
        return ()
    views: Sequence[PrefillView] = (
        [view for view in snapshot.prefills if view.id not in query.excluded]
        if config.full_scan
        else candidates(
            snapshot,
            query,
            snapshot.prefills,
            config.ring_candidates,
            config.prefix_candidates,
            config.least_loaded_candidates,
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
    deadline = first_token_deadline(snapshot, query, view)
    forecast = forecast_queue(view, now, now + work.fetch_seconds, deadline, work.compute_seconds)
    late = predicted_lateness(snapshot, query, config, view, forecast.done_seconds)
    wait = view.queue_seconds(now) + work.fetch_seconds
    score = wait + config.service_weight * work.compute_seconds
    if view.is_measured:
        score += SLO_MISS_PENALTY * ((late > 0) + forecast.num_made_late)
    elif _has_enough_to_measure(view, query):
        score += SLO_MISS_PENALTY
    queue = max(forecast.done_seconds - now - work.compute_seconds, 0.0)
    return ScoredWorker(
        view.id, score, queue, work.compute_seconds, work.local_blocks, work.fetched_blocks, late
    )


# -- decode --------------------------------------------------------------------------------


def _decode_scores(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig
) -> tuple[ScoredWorker, ...]:
    """Score the decode candidates, best first: the smaller the share of a worker's memory that
    would be used, the better; workers that would miss the ITL SLO come last. Among equal scores,
    the first worker on the hash ring from the request's id wins, so that conductors that place
    different requests at the same moment don't all choose the same worker."""
    pool = snapshot.decodes

    def eligible(names: Iterable[str]) -> Iterator[str]:
        fitting = (name for name in names if fits(pool[name], query))
        return (name for name in fitting if name not in query.excluded)

    ring = ring_successors(pool.ids, query.request_id.encode())
    least = (view.id for view in pool.by_load())
    names = dict.fromkeys(
        (*islice(eligible(ring), 1), *islice(eligible(least), config.decode_candidates))
    )
    scored = [_decode_score(snapshot, query, pool[name]) for name in names]
    return tuple(sorted(scored, key=lambda each: each.score))


def _decode_score(snapshot: Snapshot, query: PolicyQuery, view: DecodeView) -> ScoredWorker:
    itl = view.step_seconds(1, view.held_tokens(query.attended_tokens(query.num_tokens)))
    late = max(itl - query.itl_slo_seconds, 0.0) if view.is_measured else 0.0
    projected = view.projected_tokens + view.held_tokens(needed_tokens(snapshot, query))
    score = projected / view.capacity_tokens + SLO_MISS_PENALTY * (late > 0)
    return ScoredWorker(view.id, score, 0.0, itl, late_seconds=late)


# -- admission -----------------------------------------------------------------------------


def _check_admission(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    best: ScoredWorker,
    best_decode: ScoredWorker,
    decode: DecodeView,
) -> None:
    """Raise Overloaded, with the time after which to retry, if the request must be rejected.
    ``best`` is the score of the worker for the prompt, ``best_decode`` that of ``decode`` for the
    answer."""
    if best_decode.late_seconds and decode.num_requests:
        raise Overloaded(
            f"the inter-token latency would be {best_decode.service_seconds:.3f} s, which is more "
            f"than the SLO of {query.itl_slo_seconds:.3f} s",
            retry_after_seconds=1.0,
        )
    _check_first_token(snapshot, query, best)
    needed = decode.held_tokens(needed_tokens(snapshot, query))
    wait = wait_seconds(snapshot, query, decode, needed)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker has room for {max(decode.free_tokens, 0)} tokens, "
            f"and {needed} are needed",
            retry_after_seconds=max(wait, 0.1),
        )
    if snapshot.admission_rates.advantage(query.num_tokens) <= config.max_short_prompt_advantage:
        return
    spare = snapshot.admission_rates.large_tokens
    wait = wait_seconds(snapshot, query, decode, needed + spare)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker reserves its last {spare} tokens of KV for a longer "
            "prompt",
            retry_after_seconds=max(wait, 0.1),
        )


def _has_enough_to_measure(view: PrefillView, query: PolicyQuery) -> bool:
    """Return whether a worker has prompts enough to measure its speed, and so should get no further
    ones before it has."""
    tokens = view.queued_tokens
    return bool(tokens) and tokens + query.num_tokens > MAX_UNMEASURED_TOKENS


def _check_first_token(snapshot: Snapshot, query: PolicyQuery, best: ScoredWorker) -> None:
    """Raise Overloaded if the first token would be late on the best worker for the prompt, or would
    make that of an earlier request late, or if the worker has not measured its speed yet and has
    prompts enough to do so."""
    if best.worker in snapshot.prefills:
        view = snapshot.prefills[best.worker]
        if not view.is_measured and _has_enough_to_measure(view, query):
            raise Overloaded(
                f"the prefill workers are measuring their speed, with {view.queued_tokens} tokens "
                "of earlier prompts",
                retry_after_seconds=1.0,
            )
    if best.late_seconds and best.queue_seconds > IDLE_QUEUE_SECONDS:
        raise Overloaded(
            f"the time to first token would exceed its SLO by {best.late_seconds:.2f} s",
            retry_after_seconds=max(best.late_seconds, 0.1),
        )
    if best.score >= SLO_MISS_PENALTY and not best.late_seconds:
        raise Overloaded(
            "requests admitted earlier would miss their SLO because of this request",
            retry_after_seconds=1.0,
        )
