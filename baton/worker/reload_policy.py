"""Reload a prefix from the store, recompute it, or both from both ends: decided by what either
takes."""

from dataclasses import dataclass
from enum import StrEnum

SPLIT_MIN_RATIO, SPLIT_MAX_RATIO = 0.4, 2.5
"""Fetch time over compute time: between them, either alone is far from what both can do."""


class ReloadMode(StrEnum):
    FETCH = "fetch"
    RECOMPUTE = "recompute"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class ReloadDecision:
    """``num_blocks`` of the store's are worth it: fetched before the prompt starts (FETCH), or
    from the back while it is computed from the front (SPLIT)."""

    way: ReloadMode
    reason: str


def choose_way(
    num_blocks: int,
    fetch_seconds: float,
    compute_seconds: float | None,
    chunk_blocks: int,
    prefer: ReloadMode | None = None,
) -> ReloadDecision:
    """``compute_seconds`` is None while nobody knows; then the store is believed to be faster,
    which it is for all but the smallest models. What one step computes (``chunk_blocks``) is not
    worth a split. ``prefer`` is an operator's order."""
    if prefer is not None:
        return ReloadDecision(prefer, "as configured")
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
