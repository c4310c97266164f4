"""Estimates which part of a prompt a worker would have to compute, because that part is neither
cached nor worth fetching."""

from dataclasses import dataclass

from conductor.policy.config import MAX_MARGIN_SHARE, BatonPolicyConfig
from conductor.policy.kv_transfer_time import fetch_seconds
from conductor.policy.snapshot import PolicyQuery, PrefillView, Snapshot, StoredPrefix


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The work for a prompt on one worker. Fetching ``fetched_blocks`` blocks from a store takes
    ``fetch_seconds``, and the prefill after that takes ``compute_seconds``. ``local_blocks`` blocks
    are already on the device."""

    compute_seconds: float
    local_blocks: int
    fetched_blocks: int = 0
    fetch_seconds: float = 0.0


def first_token_deadline(snapshot: Snapshot, query: PolicyQuery, view: PrefillView) -> float:
    """Return the time by which the first token must come to meet the TTFT SLO. The worker orders
    its queue by this deadline."""
    return snapshot.now_seconds + query.ttft_slo_seconds + view.cost.seconds(query.num_tokens)


def predicted_lateness(
    snapshot: Snapshot,
    query: PolicyQuery,
    config: BatonPolicyConfig,
    view: PrefillView,
    done_seconds: float,
) -> float:
    """Return by how many seconds a first token that is predicted for ``done_seconds`` would miss
    the TTFT SLO minus the margin; 0 if it would not, or if the prediction is a guess. The margin
    grows by ``view.late_margin`` of the SLO."""
    if not view.is_measured:
        return 0.0
    slo = query.ttft_slo_seconds
    margin = min(config.ttft_margin_seconds, slo * MAX_MARGIN_SHARE)
    own = view.cost.seconds(query.num_tokens)
    latest = snapshot.now_seconds + slo * (1 - view.late_margin) + own - margin
    return max(done_seconds - latest, 0.0)


def prefill_work(
    snapshot: Snapshot, query: PolicyQuery, view: PrefillView, stored: StoredPrefix | None
) -> PrefillWork:
    """Estimate the prefill work at a worker. The last token is always computed. Further blocks than
    those on the device are fetched from the store on the worker's host, or from that of ``stored``,
    if that is faster than computing them."""
    device = snapshot.cache.num_device_blocks(view.id, query.keys)
    on_host = snapshot.cache.num_local_blocks(view, query.keys)
    sources = [(on_host, snapshot.link.within_host)]
    if stored is not None and stored.num_blocks > on_host:
        sources.append((stored.num_blocks, snapshot.link))
    max_cached, block = query.num_tokens - 1, snapshot.block_tokens
    cached = min(device * block, max_cached)
    best = PrefillWork(view.cost.seconds(query.num_tokens - cached, cached), device)
    for num_blocks, link in sources:
        tokens = min(num_blocks * block, max_cached)
        if tokens <= cached:
            continue
        size = (tokens - cached) * snapshot.kv_bytes_per_token
        fetch = fetch_seconds(link, query, view, size)
        compute = view.cost.seconds(query.num_tokens - tokens, tokens)
        if fetch + compute < best.fetch_seconds + best.compute_seconds:
            best = PrefillWork(compute, device, num_blocks - device, fetch)
    return best
