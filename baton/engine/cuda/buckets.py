"""Which sizes of decode batches have a graph of their own; others are filled up to the next one."""

from bisect import bisect_left

BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""Filling up costs little: weights are read once for all rows, and a row without context reads
nothing of the pool."""

SPLITS_BYTES = 512 * 1024 * 1024
"""That one layer's unfinished splits may take; a graph must have room for the longest contexts."""


def bucket_for(num_rows: int) -> int | None:
    """The smallest that holds them, or None: there is none."""
    assert num_rows > 0
    index = bisect_left(BUCKETS, num_rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


def context_limit(num_rows: int, max_tokens: int, split_tokens: int, split_bytes: int) -> int:
    """Tokens that each row of a bucket may have at most: ``max_tokens`` of the model, or what fits
    into ``SPLITS_BYTES``. ``split_bytes``: of the result of one row's split, all heads."""
    splits = SPLITS_BYTES // (num_rows * split_bytes)
    return min(max_tokens, splits * split_tokens)
