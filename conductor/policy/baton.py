"""Baton's own placement policy: filter, score, pick.

Prefill candidates are the next three workers on the hash ring, the two workers that have most of
the prompt cached, and one of the least loaded workers. A candidate's score is its queueing time,
plus the time to fetch blocks from a peer's store, plus ``service_weight`` times the prefill time:
recomputing a prefix delays every request behind it in the queue. Candidates that would miss the
TTFT deadline, or would make queued requests miss theirs, rank after all others.

The decode worker is the one with the lowest projected KV usage among those that meet the ITL SLO.
If it can prefill the prompt at a lower cost, it serves the whole request
(:mod:`conductor.policy.local_prefill`).

A request that does not fit on the decode worker, or that no candidate can serve in time, is
rejected at once: a request that would miss its SLO anyway must not make others miss theirs. Under
memory pressure, only long prompts do not fit, so only they would be rejected. To be fair, shorter
prompts must then leave memory for a long prompt until short and long prompts are admitted nearly
equally often (trunk reservation: Kelly, "Loss Networks", 1991).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from baton.core.placement import ScoredWorker
from baton.errors import Invalid, Overloaded, Unavailable
from baton.hash_ring import ring_successors
from conductor.policy.candidates import candidates
from conductor.policy.decision import Decision
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
"""Seconds added to the score of a worker for each missed SLO; more than any queue that admission
allows."""

IDLE_QUEUE_SECONDS = 1e-3
"""A worker that can start within this time counts as idle. There is no better choice than an idle
worker, so admission does not reject on its predicted TTFT."""

MAX_MARGIN_SHARE = 0.25
"""Maximum TTFT margin, as a share of the TTFT SLO."""


@dataclass(frozen=True, slots=True)
class BatonPolicyConfig:
    """Settings of Baton's policy.

    ``service_weight``: in a score, one second of prefill counts as much as this many seconds of
    queueing. ``max_short_prompt_advantage``: if the admission rate of a prompt's length quartile
    exceeds the lowest rate of any quartile by more than this, the prompt is admitted only if memory
    for a long prompt stays free. ``ttft_margin_seconds``: a worker counts as missing the TTFT SLO
    unless its first token is predicted to come at least this long before the deadline.
    ``full_scan``: whether all prefill workers are candidates."""

    ring_candidates: int = 3
    prefix_candidates: int = 2
    least_loaded_candidates: int = 5
    decode_candidates: int = 4
    service_weight: float = 4.0
    max_short_prompt_advantage: float = 0.02
    ttft_margin_seconds: float = 0.3
    admission: bool = True
    full_scan: bool = False


def place(snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig) -> Decision:
    """Place a request. Raises Unavailable if there is no worker, Overloaded if no worker can meet
    the SLO or the KV does not fit into free memory, and Invalid if the request does not fit the
    memory of any decode worker."""
    decodes = _decode_scores(snapshot, query, config)
    stored = snapshot.cache.longest_stored_prefix(query.keys)
    scores = _prefill_scores(snapshot, query, config, stored)
    if not decodes and not scores:
        raise Unavailable("no worker is ready")
    if not decodes:
        # Prefill workers have the same engine and can decode, only more slowly.
        return _on_prefill_pool(scores, stored)
    if not scores:
        return _on_decode_pool(decodes, stored)
    if config.admission and not query.must_admit:
        _check_admission(snapshot, query, config, scores[0], decodes[0])
    best = scores[0]
    local = local_prefill_decision(snapshot, query, best, decodes[0], stored)
    if local is not None:
        return replace(local, prefill_scores=scores, decode_scores=decodes)
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
    own = view.cost.seconds(query.num_tokens)
    margin = min(config.ttft_margin_seconds, query.ttft_slo_seconds * MAX_MARGIN_SHARE)
    deadline = now + query.ttft_slo_seconds + own - margin
    forecast = forecast_queue(view, now, now + work.fetch_seconds, deadline, work.compute_seconds)
    late = max(forecast.done_seconds - deadline, 0.0) if view.is_measured else 0.0
    wait = view.queue_seconds(now) + work.fetch_seconds
    score = wait + config.service_weight * work.compute_seconds
    if view.is_measured:
        score += SLO_MISS_PENALTY * ((late > 0) + forecast.num_made_late)
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
        fits = (name for name in names if _fits(pool[name], query))
        return (name for name in fits if name not in query.excluded)

    ring = ring_successors(pool.ids, query.request_id.encode())
    least = (view.id for view in pool.by_load())
    names = dict.fromkeys(
        (*islice(eligible(ring), 1), *islice(eligible(least), config.decode_candidates))
    )
    if not names and len(pool):
        _check_size(pool, query)
    scored = [_decode_score(snapshot, query, pool[name]) for name in names]
    return tuple(sorted(scored, key=lambda each: each.score))


def _check_size(pool: WorkerPool[DecodeView], query: PolicyQuery) -> None:
    """Raise Invalid if the request fits the memory of no decode worker, even if excluded workers
    are considered."""
    if not any(_fits(view, query) for view in pool):
        most = max(view.capacity_tokens for view in pool)
        raise Invalid(
            f"the request has {query.num_tokens} tokens, and the largest decode worker has memory "
            f"for {most}",
            param="prompt",
            code="context_length_exceeded",
        )


def _fits(view: DecodeView, query: PolicyQuery) -> bool:
    """Whether the request's prompt fits the worker's memory when it is empty."""
    return view.held_tokens(query.num_tokens) <= view.capacity_tokens


def _decode_score(snapshot: Snapshot, query: PolicyQuery, view: DecodeView) -> ScoredWorker:
    itl = view.step_seconds(1, view.held_tokens(query.num_tokens))
    late = max(itl - query.itl_slo_seconds, 0.0) if view.is_measured else 0.0
    projected = view.projected_tokens + view.held_tokens(_needed_tokens(snapshot, query))
    score = projected / view.capacity_tokens + SLO_MISS_PENALTY * (late > 0)
    return ScoredWorker(view.id, score, 0.0, itl, late_seconds=late)


def _needed_tokens(snapshot: Snapshot, query: PolicyQuery) -> int:
    return query.num_tokens + int(min(snapshot.answer_tokens, query.max_new_tokens))


# -- admission -----------------------------------------------------------------------------


def _check_admission(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    best: ScoredWorker,
    best_decode: ScoredWorker,
) -> None:
    """Raise Overloaded, with the time after which to retry, if the request must be rejected."""
    decode = snapshot.decodes[best_decode.worker]
    if best_decode.late_seconds and decode.num_requests:
        raise Overloaded(
            f"the inter-token latency would be {best_decode.service_seconds:.3f} s, which is more "
            f"than the SLO of {query.itl_slo_seconds:.3f} s",
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
    needed = decode.held_tokens(_needed_tokens(snapshot, query))
    wait = _wait_seconds(snapshot, query, decode, needed)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker has room for {max(decode.free_tokens, 0)} tokens, "
            f"and {needed} are needed",
            retry_after_seconds=max(wait, 0.1),
        )
    if snapshot.admission_rates.advantage(query.num_tokens) <= config.max_short_prompt_advantage:
        return
    spare = snapshot.admission_rates.large_tokens
    wait = _wait_seconds(snapshot, query, decode, needed + spare)
    if wait > 0:
        raise Overloaded(
            f"the least loaded decode worker reserves its last {spare} tokens of KV for a longer "
            "prompt",
            retry_after_seconds=max(wait, 0.1),
        )


def _wait_seconds(snapshot: Snapshot, query: PolicyQuery, decode: DecodeView, needed: int) -> float:
    """Return how many seconds the KV would wait for free memory, minus the delay that even a short
    answer can make up by decoding faster than the ITL SLO. Assumes that the worker frees its
    ``projected_tokens`` at an even rate, all of them within the duration of one mean answer."""
    deficit = needed - decode.free_tokens
    if deficit <= 0 or not decode.num_requests:
        return 0.0
    step = decode.step_seconds()
    drain = deficit / max(decode.projected_tokens, 1) * step * snapshot.answer_tokens
    spare = max(query.itl_slo_seconds - step, 0.0) * snapshot.short_answer_tokens
    return drain - spare
