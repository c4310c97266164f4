"""Conditional disaggregation: when a decode worker had better read a prompt itself."""

from conductor.policy.decision import Decision, ScoredWorker
from conductor.policy.prefill_work import prefill_work
from conductor.policy.snapshot import PolicyQuery, PrefillView, Snapshot, StoredPrefix

MAX_LOCAL_PREFILL_SHARE = 0.6
"""Of a decode worker's time. Its answers wait meanwhile, and short ones feel every prompt."""


def local_prefill_decision(
    snapshot: Snapshot,
    query: PolicyQuery,
    best: ScoredWorker,
    writer: ScoredWorker,
    stored: StoredPrefix | None,
) -> Decision | None:
    """The decode worker for all of it, if that costs less than to compute elsewhere and ship. To
    compute there holds up everybody in its batch, so that time counts once for each of them, and
    what it has read of late must not take more of its time than :data:`MAX_LOCAL_PREFILL_SHARE`,
    nor one prompt longer than the gap between two tokens may be."""
    view = snapshot.decodes[writer.worker]
    if view.prefill_cost is None:
        return None
    work = prefill_work(snapshot, query, PrefillView(view.id, view.prefill_cost, view.node), stored)
    behind = max(view.reads_until_seconds - snapshot.now_seconds, 0.0)
    if behind + work.compute_seconds > query.token_gap_seconds:
        return None
    missing = query.num_tokens - work.local_blocks * snapshot.block_tokens
    shipping = snapshot.link.seconds(max(missing, 0) * snapshot.kv_bytes_per_token)
    elsewhere = best.queue_seconds + best.service_seconds + shipping
    here = work.fetch_seconds + work.compute_seconds * (1 + view.num_requests)
    if here >= elsewhere:
        return None
    return Decision(
        None,
        view.id,
        f"computes {work.compute_seconds:.3f} s itself, among {view.num_requests} others, rather "
        f"than wait {elsewhere:.3f} s for another and the link",
        stored if work.fetched_blocks else None,
        work.compute_seconds,
        work.fetch_seconds + work.compute_seconds,
        writer.service_seconds,
    )
