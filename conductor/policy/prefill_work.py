"""Estimates which part of a prompt a worker would have to compute, because that part is neither
cached nor worth fetching."""

from dataclasses import dataclass

from conductor.policy.config import MAX_MARGIN_SHARE, BatonPolicyConfig
from conductor.policy.kv_transfer_time import fetch_seconds
from conductor.policy.snapshot import PolicyQuery, PrefillView, Snapshot, StoredPrefix


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The work for a prompt on one worker. Fetching ``fetched_blocks`` blocks from a peer's store
    takes ``fetch_seconds``, and the prefill after that takes ``compute_seconds``. ``local_blocks``
    blocks are already cached."""

    compute_seconds: float
    local_blocks: int
    fetched_blocks: int = 0
    fetch_seconds: float = 0.0


def first_token_deadline(
    snapshot: Snapshot, query: PolicyQuery, config: BatonPolicyConfig, view: PrefillView
) -> float:
    """Return the time by which the first token must be predicted to come, so that the TTFT SLO is
    met with a margin."""
    own = view.cost.seconds(query.num_tokens)
    margin = min(config.ttft_margin_seconds, query.ttft_slo_seconds * MAX_MARGIN_SHARE)
    return snapshot.now_seconds + query.ttft_slo_seconds + own - margin


def prefill_work(
    snapshot: Snapshot, query: PolicyQuery, view: PrefillView, stored: StoredPrefix | None
) -> PrefillWork:
    """Estimate the prefill work at a worker. The last token is always computed. The blocks of
    ``stored`` are fetched if that is faster than computing them."""
    max_cached = query.num_tokens - 1
    local = snapshot.cache.num_local_blocks(view, query.keys)
    cached = min(local * snapshot.block_tokens, max_cached)
    without_fetch = view.cost.seconds(query.num_tokens - cached, cached)
    if stored is None or stored.num_blocks <= local:
        return PrefillWork(without_fetch, local)
    stored_tokens = min(stored.num_blocks * snapshot.block_tokens, max_cached)
    missing = (stored_tokens - cached) * snapshot.kv_bytes_per_token
    fetch = fetch_seconds(snapshot, query, view, missing)
    with_fetch = view.cost.seconds(query.num_tokens - stored_tokens, stored_tokens)
    if fetch + with_fetch >= without_fetch:
        return PrefillWork(without_fetch, local)
    return PrefillWork(with_fetch, local, stored.num_blocks - local, fetch)
