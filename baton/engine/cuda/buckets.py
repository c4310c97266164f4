"""Defines the batch sizes that have a CUDA graph (buckets). Other batches are padded to the next
bucket."""

from bisect import bisect_left

BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""The batch sizes. Padding costs little: weights are read once for all rows, and a padding row,
which has no context, reads nothing from the pool."""

MAX_SPLITS_BYTES = 512 * 1024 * 1024
"""Maximum size of the buffer in which a graph keeps the split results of one layer. The buffer is
large enough for the longest contexts that the graph supports."""


def bucket_for(num_rows: int) -> int | None:
    """Return the smallest bucket for ``num_rows`` rows; None if there is none."""
    assert num_rows > 0
    index = bisect_left(BUCKETS, num_rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


def context_limit(num_rows: int, max_tokens: int, split_tokens: int, split_bytes: int) -> int:
    """Return the maximum context of each row of a bucket: the model's ``max_tokens``, or fewer
    tokens if their split results would exceed ``MAX_SPLITS_BYTES``. ``split_bytes`` is the size of
    one split's result for one row and all heads."""
    splits = MAX_SPLITS_BYTES // (num_rows * split_bytes)
    return min(max_tokens, splits * split_tokens)
