"""Triton kernels that apply top-k and top-p, without sorting the vocabulary. They run after
``sum_weights`` of :mod:`baton.engine.cuda.sampling_kernels`, which describes their arguments.

1. ``gather_candidates`` copies the weights of the bins in which top-k and top-p end.
2. ``apply_filters`` finds the smallest weight that both keep, by bisection.
"""

import triton
import triton.language as tl

from baton.engine.cuda.sampling_kernels import (
    BINS,
    COUNTS,
    MASSES,
    NUM_COLUMNS,
    RECORD_SIZE,
    SUM,
    THRESHOLD,
    TIES,
    TOP_K,
    TOP_P,
    load_scores,
    records_of_row,
    weights_and_bins,
)

COLUMNS_AT_ONCE = tl.constexpr(16)
"""Number of candidates of each chunk that are summed at once."""


@triton.jit
def gather_candidates(
    scores_ptr,
    stride,
    rows_ptr,
    records_ptr,
    candidates_ptr,  # [num_rows, VOCAB] in FP64
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the weights of the tokens in the candidate bins (see :func:`_candidate_bins`) without
    gaps, in the order of token ids. There is one program per row and chunk."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    row_ptr = rows_ptr + row * NUM_COLUMNS
    records_ptr = records_of_row(records_ptr, VOCAB, CHUNK)
    first, last = _candidate_bins(row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    scores, _ = load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, bins = weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    chunks = tl.arange(0, PADDED)
    before = _num_candidates(records_ptr + chunks * RECORD_SIZE, first, last, chunks < chunk)
    is_candidate = (bins >= first) & (bins <= last)
    places = tl.sum(before) + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
    tl.store(candidates_ptr + row.to(tl.int64) * VOCAB + places, weights, mask=is_candidate)


@triton.jit
def apply_filters(
    rows_ptr,
    records_ptr,
    candidates_ptr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # number of candidates that are read at once
):
    """Write THRESHOLD, SUM and TIES. There is one program per row."""
    row = tl.program_id(0)
    row_ptr = rows_ptr + row * NUM_COLUMNS
    records_ptr = records_of_row(records_ptr, VOCAB, CHUNK)
    candidates_ptr += row.to(tl.int64) * VOCAB
    first, last = _candidate_bins(row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    chunks = tl.arange(0, PADDED)
    record_ptrs = records_ptr + chunks * RECORD_SIZE
    is_chunk = chunks < (VOCAB + CHUNK - 1) // CHUNK
    sizes = _num_candidates(record_ptrs, first, last, is_chunk)
    num = tl.sum(sizes)
    masses_above = _until_bin(record_ptrs + MASSES, first - 1, is_chunk)
    mass_above = tl.sum(masses_above)
    count_above = tl.sum(_until_bin(record_ptrs + COUNTS, first - 1, is_chunk))
    total = tl.sum(tl.load(record_ptrs + SUM, mask=is_chunk, other=0.0))
    threshold = tl.load(row_ptr + THRESHOLD)
    ties = threshold
    top_k, top_p = tl.load(row_ptr + TOP_K), tl.load(row_ptr + TOP_P)
    if top_k < VOCAB:
        left = top_k - count_above
        threshold = _find_threshold(candidates_ptr, num, left, True, BLOCK)
        count, mass, equal = _sums_above(candidates_ptr, num, threshold, BLOCK)
        ties = tl.minimum(left - count, equal)
        total = mass_above + mass + ties * threshold
    if top_p < 1:
        left = top_p * total - mass_above
        top_p_threshold = _find_threshold(candidates_ptr, num, left, False, BLOCK)
        _, mass, equal = _sums_above(candidates_ptr, num, top_p_threshold, BLOCK)
        needed = tl.ceil((left - mass) / top_p_threshold)
        needed = tl.where(needed > 1, needed, 1.0)  # 1 also if there is no candidate
        needed = tl.minimum(needed, equal)
        both = tl.where(top_p_threshold == threshold, tl.minimum(needed, ties), ties)
        ties = tl.where(top_p_threshold > threshold, needed, both)
        threshold = tl.maximum(top_p_threshold, threshold)
    tl.store(row_ptr + THRESHOLD, threshold)
    mass, equal = _sums_by_chunk(candidates_ptr, sizes, threshold, PADDED)
    kept = tl.minimum(equal, tl.maximum(ties - (tl.cumsum(equal, axis=0) - equal), 0.0))
    tl.store(record_ptrs + SUM, masses_above + mass + kept * threshold, mask=is_chunk)
    tl.store(record_ptrs + TIES, kept, mask=is_chunk)


@triton.jit
def _candidate_bins(
    row_ptr, records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr
):
    """Return the first and the last of the bins that may contain the smallest weight that top-k or
    top-p keeps. It is one bin, except with both: top-p's share refers to the sum of what top-k
    keeps, of which only a lower bound is known before top-k is applied."""
    chunks, bins = tl.arange(0, PADDED)[:, None], tl.arange(0, BINS)
    ptrs = records_ptr + chunks * RECORD_SIZE + bins[None, :]
    is_chunk = chunks < (VOCAB + CHUNK - 1) // CHUNK
    counts = tl.sum(tl.load(ptrs + COUNTS, mask=is_chunk, other=0.0), axis=0)
    masses = tl.sum(tl.load(ptrs + MASSES, mask=is_chunk, other=0.0), axis=0)
    top_k, top_p = tl.load(row_ptr + TOP_K), tl.load(row_ptr + TOP_P)
    has_top_k = top_k < VOCAB
    last_of_top_k = tl.minimum(tl.sum((counts < top_k).to(tl.int32)), BINS - 1)
    least_place = tl.where(has_top_k, last_of_top_k - 1, BINS - 1)
    least = tl.sum(tl.where(bins == least_place, masses, 0.0))
    first = tl.minimum(tl.sum((masses < top_p * least).to(tl.int32)), BINS - 1)
    last = tl.where(has_top_k, last_of_top_k, first)
    return tl.where(top_p < 1, first, last), last


@triton.jit
def _until_bin(ptrs, last, mask):
    """Return COUNTS or MASSES until the bin ``last``; 0 if it is negative, or where ``mask`` is
    false. ``ptrs`` are those of bin 0."""
    return tl.load(ptrs + last, mask=mask & (last >= 0), other=0.0)


@triton.jit
def _num_candidates(record_ptrs, first, last, mask):
    """Return the number of the candidates of each chunk, 0 where ``mask`` is false."""
    ptrs = record_ptrs + COUNTS
    return (_until_bin(ptrs, last, mask) - _until_bin(ptrs, first - 1, mask)).to(tl.int32)


@triton.jit
def _find_threshold(values_ptr, num, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest of the ``num`` values, which are in (0, 1], such that those not below it
    reach ``target``: in number with COUNT, else in sum. If all of them do not reach it, return 0.

    This bisects the values' bit patterns, whose order is that of the values. Both ends of the range
    move to values that exist. Hence it takes at most 62 passes, and usually about log2(num)."""
    low, high = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
    while low < high:
        low_bits, high_bits = low.to(tl.int64, bitcast=True), high.to(tl.int64, bitcast=True)
        middle = (low_bits + ((high_bits - low_bits + 1) >> 1)).to(tl.float64, bitcast=True)
        above, below, reached = _split(values_ptr, num, middle, COUNT, BLOCK)
        low = tl.where(reached >= target, above, low)
        high = tl.where(reached >= target, high, below)
    return high


@triton.jit
def _split(values_ptr, num, middle, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest value that is not below ``middle`` (or infinity), the largest one below
    it (or 0), and the number (with COUNT) or the sum of those not below it."""
    above = tl.full([BLOCK], float("inf"), tl.float64)
    below = tl.zeros([BLOCK], tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < num, other=0.0)
        is_above = values >= middle  # middle is above 0
        above = tl.minimum(above, tl.where(is_above, values, float("inf")))
        below = tl.maximum(below, tl.where(is_above, 0.0, values))
        if COUNT:
            sums += tl.where(is_above, 1.0, 0.0)
        else:
            sums += tl.where(is_above, values, 0.0)
    return tl.min(above), tl.max(below), tl.sum(sums)


@triton.jit
def _sums_above(values_ptr, num, threshold, BLOCK: tl.constexpr):
    """Return how many of the values are above ``threshold``, their sum, and how many are equal to
    it, all in FP64."""
    counts, sums, equals = (
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
    )
    for start in range(0, num, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < num, other=0.0)
        counts += tl.where(values > threshold, 1.0, 0.0)
        sums += tl.where(values > threshold, values, 0.0)
        equals += tl.where((values == threshold) & (values > 0), 1.0, 0.0)
    return tl.sum(counts), tl.sum(sums), tl.sum(equals)


@triton.jit
def _sums_by_chunk(values_ptr, sizes, threshold, PADDED: tl.constexpr):
    """Return the sum of each chunk's values above ``threshold``, and how many are equal to it, both
    [PADDED] in FP64. ``sizes`` [PADDED] are the numbers of the chunks' values, which follow one
    another."""
    starts = (tl.cumsum(sizes, axis=0) - sizes)[:, None]
    sums = tl.zeros([PADDED, COLUMNS_AT_ONCE], tl.float64)
    equals = tl.zeros([PADDED, COLUMNS_AT_ONCE], tl.float64)
    for column in range(0, tl.max(sizes), COLUMNS_AT_ONCE):
        columns = column + tl.arange(0, COLUMNS_AT_ONCE)[None, :]
        values = tl.load(values_ptr + starts + columns, mask=columns < sizes[:, None], other=0.0)
        sums += tl.where(values > threshold, values, 0.0)
        equals += tl.where((values == threshold) & (values > 0), 1.0, 0.0)
    return tl.sum(sums, axis=1), tl.sum(equals, axis=1)
