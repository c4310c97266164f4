"""Decides when a decode worker should prefill a prompt itself (conditional disaggregation)."""

from baton.core.placement import ScoredWorker
from conductor.policy.decision import Decision
from conductor.policy.kv_transfer_time import missing_bytes, transfer_seconds
from conductor.policy.prefill_work import prefill_work
from conductor.policy.snapshot import PolicyQuery, PrefillView, Snapshot, StoredPrefix

MAX_LOCAL_PREFILL_SHARE = 0.6
"""Maximum share of a decode worker's time for local prefill. The decode batch waits during a local
prefill, which delays short answers most."""


def local_prefill_decision(
    snapshot: Snapshot,
    query: PolicyQuery,
    best_prefill: ScoredWorker,
    best_decode: ScoredWorker,
    stored: StoredPrefix | None,
) -> Decision | None:
    """Place the whole request on the decode worker if that costs less than a remote prefill and the
    KV transfer; otherwise return None. A local prefill delays every request in the decode batch, so
    its time is counted once more for each of them. The prefill, together with the wait before it,
    must not take longer than the ITL SLO. The prefill has to wait while earlier local prefills take
    up more than :data:`MAX_LOCAL_PREFILL_SHARE` of the worker's time."""
    view = snapshot.decodes[best_decode.worker]
    if view.prefill_cost is None:
        return None
    own = PrefillView(view.id, view.prefill_cost, view.node, store_codec=view.store_codec)
    work = prefill_work(snapshot, query, own, stored)
    backlog = max(view.local_prefill_until_seconds - snapshot.now_seconds, 0.0)
    if backlog + work.compute_seconds > query.itl_slo_seconds:
        return None
    missing = missing_bytes(snapshot, query, work.local_blocks * snapshot.block_tokens)
    prefill = snapshot.prefills[best_prefill.worker]
    transfer = transfer_seconds(snapshot, query, prefill, view, missing)
    remote = best_prefill.queue_seconds + best_prefill.service_seconds + transfer
    local = work.fetch_seconds + work.compute_seconds * (1 + view.num_requests)
    if local >= remote:
        return None
    return Decision(
        None,
        view.id,
        f"local prefill takes {work.compute_seconds:.3f} s and delays {view.num_requests} "
        f"requests; a remote prefill and the KV transfer would take {remote:.3f} s",
        stored if work.fetched_blocks else None,
        work.compute_seconds,
        work.fetch_seconds + work.compute_seconds,
        best_decode.service_seconds,
    )
