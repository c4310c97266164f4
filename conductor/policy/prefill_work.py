"""What of a prompt has to be computed at a worker: the rest is there, or worth fetching."""

from dataclasses import dataclass

from conductor.policy.snapshot import PolicyQuery, PrefillView, Snapshot, StoredPrefix


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """``compute_seconds`` of the worker's time; before it, ``fetch_seconds`` of a link's."""

    compute_seconds: float
    local_blocks: int
    fetched_blocks: int = 0
    fetch_seconds: float = 0.0


def prefill_work(
    snapshot: Snapshot, query: PolicyQuery, view: PrefillView, stored: StoredPrefix | None
) -> PrefillWork:
    """The last token is always computed. Blocks of ``stored`` are fetched where that is quicker
    than to compute them."""
    most = query.num_tokens - 1
    local = snapshot.cache.local_blocks(view, query.keys)
    cached = min(local * snapshot.block_tokens, most)
    alone = view.cost.seconds(query.num_tokens - cached, cached)
    if stored is None or stored.num_blocks <= local:
        return PrefillWork(alone, local)
    reach = min(stored.num_blocks * snapshot.block_tokens, most)
    fetch = snapshot.link.seconds((reach - cached) * snapshot.kv_bytes_per_token)
    rest = view.cost.seconds(query.num_tokens - reach, reach)
    if fetch + rest >= alone:
        return PrefillWork(alone, local)
    return PrefillWork(rest, local, stored.num_blocks - local, fetch)
