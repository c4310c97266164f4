"""Decides by predicted times whether to fetch a prefix from the store, recompute it, or split it,
which means to recompute it from the front while fetching it from the back."""

from dataclasses import dataclass
from enum import StrEnum

from baton.worker.limits import MAX_FETCH_TIMEOUT_SECONDS, MIN_FETCH_TIMEOUT_SECONDS

SPLIT_MIN_RATIO, SPLIT_MAX_RATIO = 0.4, 2.5
"""A split is clearly faster than either fetching or recomputing alone if the fetch time divided by
the compute time is between these bounds."""

FETCH_TIMEOUT_FACTOR = 2.0


class ReloadMode(StrEnum):
    FETCH = "fetch"
    RECOMPUTE = "recompute"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class ReloadDecision:
    """FETCH: fetch the blocks before the prefill starts. RECOMPUTE: fetch nothing. SPLIT: fetch
    them from the back while the prompt is computed from the front."""

    mode: ReloadMode
    reason: str


def fetch_timeout_seconds(estimate_seconds: float) -> float:
    """Return the timeout of fetching a whole prefix that was predicted to take
    ``estimate_seconds``: a long prefix over a slow link takes its time, if that was chosen."""
    seconds = FETCH_TIMEOUT_FACTOR * estimate_seconds
    return min(max(seconds, MIN_FETCH_TIMEOUT_SECONDS), MAX_FETCH_TIMEOUT_SECONDS)


def choose_reload_mode(
    num_blocks: int,
    fetch_seconds: float,
    compute_seconds: float | None,
    chunk_blocks: int,
    preferred_mode: ReloadMode | None = None,
) -> ReloadDecision:
    """Choose the mode for ``num_blocks`` stored blocks. ``compute_seconds`` is None while the
    prefill speed is unknown; in that case, the store is assumed to be faster, as it is for all but
    the smallest models. A prefix that one step can compute (at most ``chunk_blocks``) is never
    split. ``preferred_mode`` is the mode set in the configuration, if any, which overrides
    everything else."""
    if preferred_mode is not None:
        return ReloadDecision(preferred_mode, "as configured")
    if compute_seconds is None:
        return ReloadDecision(ReloadMode.FETCH, "prefill speed is not known yet")
    ratio = fetch_seconds / max(compute_seconds, 1e-9)
    reason = (
        f"{num_blocks} blocks: fetch {fetch_seconds * 1e3:.2f} ms, "
        f"compute {compute_seconds * 1e3:.2f} ms"
    )
    if num_blocks <= chunk_blocks:
        return ReloadDecision(ReloadMode.FETCH if ratio <= 1 else ReloadMode.RECOMPUTE, reason)
    if ratio < SPLIT_MIN_RATIO:
        return ReloadDecision(ReloadMode.FETCH, reason)
    if ratio > SPLIT_MAX_RATIO:
        return ReloadDecision(ReloadMode.RECOMPUTE, reason)
    return ReloadDecision(ReloadMode.SPLIT, reason)
