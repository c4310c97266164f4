"""Baton's own placement: filter, score, pick.

Prefill candidates are the ring's next three, the two that hold most of the prompt, and the least
loaded. A candidate's score is its queue, and ``service_weight`` times what it would have to
compute: work that is done again is a cost to everyone behind. A candidate that would be late, or
make others late, comes after all that would not.

The decode worker is the one whose memory is the least promised. A request that it can't hold, or
that no candidate can serve in time, is refused at once: what would be late anyway must not make
others late. Long prompts are what does not fit, so under pressure they alone would be refused;
then shorter ones have to leave room for a long one, until both are let in equally often (trunk
reservation: Kelly, "Loss Networks", 1991).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from baton.errors import Overloaded, Unavailable
from conductor.policy.candidates import candidates
from conductor.policy.decision import Decision, Scored
from conductor.policy.fleet import DecodeView, PrefillView, Query, Snapshot, Stored
from conductor.policy.outlook import outlook
from conductor.policy.reuse import service

LATE_SCORE = 1e3
"""Seconds; more than any queue that is let grow."""


@dataclass(frozen=True, slots=True)
class BatonConfig:
    """``service_weight`` is what a second of computing costs in seconds of waiting.
    ``fair_advantage`` is how much more often short prompts may be let in than long ones.
    ``margin_seconds`` is by how much a first token is planned to come before its deadline."""

    ring_candidates: int = 3
    holder_candidates: int = 2
    least_candidates: int = 1
    decode_candidates: int = 4
    service_weight: float = 4.0
    fair_advantage: float = 0.02
    margin_seconds: float = 0.3
    admission: bool = True
    full_scan: bool = False


def place(snapshot: Snapshot, query: Query, config: BatonConfig) -> Decision:
    """Raises Unavailable when there is no worker, Overloaded when none can meet the SLO."""
    decodes = _decode_scores(snapshot, query, config)
    stored = snapshot.cache.stored(query.keys)
    scores = _prefill_scores(snapshot, query, config, stored)
    if not decodes and not scores:
        raise Unavailable("no worker is ready")
    if not decodes:
        # A prefill worker has the same engine: slow is better than nothing.
        return _alone(scores, "no decode worker is ready", stored)
    if not scores:
        return _alone(decodes, "no prefill worker is ready", stored)
    if config.admission and not query.promised:
        _admit(snapshot, query, config, scores[0], snapshot.decodes[decodes[0].worker])
    best = scores[0]
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


def _alone(scores: tuple[Scored, ...], reason: str, stored: Stored | None) -> Decision:
    return Decision(None, scores[0].worker, reason, stored, decode_scores=scores)


def _reason(best: Scored, query: Query, num_scored: int) -> str:
    return (
        f"{best.local_blocks} of {len(query.keys)} blocks at hand, {best.fetched_blocks} to fetch, "
        f"starts in {best.queue_seconds:.3f} s, computes {best.service_seconds:.3f} s, "
        f"best of {num_scored}"
    )


# -- prefill -------------------------------------------------------------------------------


def _prefill_scores(
    snapshot: Snapshot, query: Query, config: BatonConfig, stored: Stored | None
) -> tuple[Scored, ...]:
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
    query: Query,
    config: BatonConfig,
    view: PrefillView,
    stored: Stored | None,
) -> Scored:
    now = snapshot.now_seconds
    work = service(snapshot, query, view, stored)
    own = view.cost.seconds(query.num_tokens)
    deadline = now + query.first_token_seconds + own - config.margin_seconds
    then = outlook(view, now, now + work.fetch_seconds, deadline, work.compute_seconds)
    late = max(then.done_seconds - deadline, 0.0)
    score = view.queue_seconds(now) + config.service_weight * work.compute_seconds
    score += LATE_SCORE * ((late > 0) + then.num_harmed)
    queue = then.done_seconds - now - work.compute_seconds
    return Scored(
        view.id, score, queue, work.compute_seconds, work.local_blocks, work.fetched_blocks, late
    )


# -- decode --------------------------------------------------------------------------------


def _decode_scores(snapshot: Snapshot, query: Query, config: BatonConfig) -> tuple[Scored, ...]:
    """By what share of the memory will be promised; who would be too slow comes last."""
    least = (view for view in snapshot.decodes.least() if view.id not in query.excluded)
    views = islice(least, config.decode_candidates)
    scored = [_decode_score(snapshot, query, view) for view in views]
    return tuple(sorted(scored, key=lambda each: each.score))


def _decode_score(snapshot: Snapshot, query: Query, view: DecodeView) -> Scored:
    gap = view.step_seconds(1, query.num_tokens)
    late = max(gap - query.token_gap_seconds, 0.0)
    promised = view.promised_tokens + _needed_tokens(snapshot, query)
    score = promised / view.capacity_tokens + LATE_SCORE * (late > 0)
    return Scored(view.id, score, 0.0, gap, late_seconds=late)


def _needed_tokens(snapshot: Snapshot, query: Query) -> int:
    return query.num_tokens + int(min(snapshot.answer_tokens, query.max_new_tokens))


# -- admission -----------------------------------------------------------------------------


def _admit(
    snapshot: Snapshot, query: Query, config: BatonConfig, best: Scored, decode: DecodeView
) -> None:
    """Raises Overloaded, with the time after which it may be otherwise."""
    if best.late_seconds and best.queue_seconds > 0:
        raise Overloaded(
            f"the first token would come {best.late_seconds:.2f} s late",
            retry_after_seconds=max(best.late_seconds, 0.1),
        )
    if best.score >= LATE_SCORE and not best.late_seconds:
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


def _wait_seconds(snapshot: Snapshot, query: Query, decode: DecodeView, needed: int) -> float:
    """By how much the KV would have to wait for room longer than even a short answer can make up
    for. Promised tokens get free evenly, all of them within one answer's time."""
    deficit = needed - decode.free_tokens
    if deficit <= 0 or not decode.num_requests:
        return 0.0
    step = decode.step_seconds()
    drain = deficit / max(decode.promised_tokens, 1) * step * snapshot.answer_tokens
    spare = max(query.token_gap_seconds - step, 0.0) * snapshot.short_answer_tokens
    return drain - spare
