"""Scores mixed workers, which compute prompts and answers in the same steps.

A score is the predicted cost of the request in seconds: the time until the prompt's computation
begins, plus ``service_weight`` times its duration, as on a prefill worker, plus the time that the
answer takes at the predicted inter-token latency. So requests go where their prefix is cached,
unless prompts wait or many answers are in progress there.
"""

from baton.core.placement import ScoredWorker
from conductor.policy.candidates import candidates
from conductor.policy.config import SLO_MISS_PENALTY, BatonPolicyConfig
from conductor.policy.memory import fits, needed_tokens, wait_seconds
from conductor.policy.prefill_work import (
    first_token_deadline,
    predicted_lateness,
    prefill_work,
)
from conductor.policy.queue_forecast import forecast_queue
from conductor.policy.snapshot import MixedView, PolicyQuery, Snapshot, StoredPrefix


def mixed_scores(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig, stored: StoredPrefix | None
) -> tuple[ScoredWorker, ...]:
    """Score the candidates among the mixed workers, best first; empty if there are no mixed workers
    that it fits."""
    if not len(snapshot.mixed):
        return ()
    found = candidates(
        snapshot,
        query,
        snapshot.mixed,
        config.ring_candidates,
        config.prefix_candidates,
        config.least_loaded_candidates,
    )
    scored = [
        _score(snapshot, query, config, view, stored) for view in found if fits(view.decode, query)
    ]
    return tuple(sorted(scored, key=lambda each: each.score))


def _score(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    view: MixedView,
    stored: StoredPrefix | None,
) -> ScoredWorker:
    now, prefill, decode = snapshot.now_seconds, view.prefill, view.decode
    work = prefill_work(snapshot, query, prefill, stored)
    compute = work.compute_seconds * view.prompt_slowdown
    deadline = first_token_deadline(snapshot, query, prefill)
    forecast = forecast_queue(prefill, now, now + work.fetch_seconds, deadline, compute)
    late = predicted_lateness(snapshot, query, config, prefill, forecast.done_seconds)
    num_made_late = forecast.num_made_late if prefill.is_measured else 0
    itl = view.itl_seconds(1, decode.held_tokens(query.attended_tokens(query.num_tokens)))
    is_slow = decode.is_measured and itl > query.itl_slo_seconds
    memory_wait = wait_seconds(
        snapshot, query, decode, decode.held_tokens(needed_tokens(snapshot, query))
    )
    missed = (late > 0) + num_made_late + is_slow + (memory_wait > 0)
    score = prefill.queue_seconds(now) + work.fetch_seconds + config.service_weight * compute
    score += min(snapshot.answer_tokens, query.max_new_tokens) * itl + SLO_MISS_PENALTY * missed
    queue = max(forecast.done_seconds - now - compute, 0.0)
    return ScoredWorker(
        view.id, score, queue, compute, work.local_blocks, work.fetched_blocks, late
    )
