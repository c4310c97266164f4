"""Triton kernels that choose tokens from scores (logits, perhaps with penalties), for any
distribution in bounded time, without sorting the vocabulary.

Each row of scores is split into chunks of CHUNK tokens. The weight of a token is
exp((score - maximum) / temperature) in FP64, or 0 if min-p excludes the token. Sums of weights have
a fixed order, which does not depend on the batch. The kernels run in this order:

1. ``find_maxima`` finds each chunk's likeliest token.
2. ``sum_weights`` sums each chunk's weights. For top-k and top-p it also sorts the tokens into bins
   by the logarithm of their weights, and sums each bin.
3. ``gather_candidates`` copies the weights of those bins in which top-k or top-p ends.
4. ``apply_filters`` finds the smallest weight that top-k and top-p keep, by bisection, and replaces
   each chunk's sum by the sum of the weights that are kept.
5. ``pick_tokens`` inverts the cumulative distribution at each row's random draw.

All need a table of the rows' parameters, ``rows_ptr`` [num_rows, NUM_COLUMNS] in FP64, and one
record for each row and chunk, ``records_ptr`` [num_rows, num_chunks, RECORD_SIZE] in FP64.
``scores_ptr`` is FP32 or FP64, with ``stride`` numbers from row to row.
"""

import triton
import triton.language as tl

SCORE_ROW = tl.constexpr(0)
"""Columns of the table. First the index of the row in the scores, and in the chosen tokens."""
TOKEN_ROW = tl.constexpr(1)
TEMPERATURE = tl.constexpr(2)  # 0 in a greedy row, which only kernels 1 and 5 process
MIN_P = tl.constexpr(3)
TOP_K = tl.constexpr(4)  # the size of the vocabulary in a row without top-k
TOP_P = tl.constexpr(5)
DRAW = tl.constexpr(6)
THRESHOLD = tl.constexpr(7)  # 0 until apply_filters sets it: tokens of larger weights are kept
NUM_COLUMNS = tl.constexpr(8)

BINS = tl.constexpr(16)
"""Number of bins. Bin b has the tokens whose weight has a logarithm in (-b - 1, -b]; the last bin
has all smaller weights, too. Tokens of weight 0 are in no bin."""

MAXIMUM = tl.constexpr(0)  # the chunk's largest score
BEST = tl.constexpr(1)  # its token id
SUM = tl.constexpr(2)  # the sum of the weights that are kept
TIES = tl.constexpr(3)  # number of tokens of the threshold's weight that are kept, first ids first
COUNTS = tl.constexpr(4)  # for each bin, the number of tokens in it and in the bins before
MASSES = tl.constexpr(20)  # likewise, the sum of their weights
RECORD_SIZE = tl.constexpr(36)

COLUMNS_AT_ONCE = tl.constexpr(16)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def find_maxima(
    scores_ptr, stride, rows_ptr, records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Write MAXIMUM and BEST; of equal scores, the lowest id is BEST. There is one program per row
    and chunk."""
    chunk = tl.program_id(1)
    row_ptr = rows_ptr + tl.program_id(0) * NUM_COLUMNS
    scores, _ = _load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    maximum, place = tl.max(scores, axis=0, return_indices=True)
    record_ptr = _records_of_row(records_ptr, VOCAB, CHUNK) + chunk * RECORD_SIZE
    tl.store(record_ptr + MAXIMUM, maximum)
    tl.store(record_ptr + BEST, (chunk * CHUNK + place).to(tl.float64))


@triton.jit
def sum_weights(
    scores_ptr,
    stride,
    rows_ptr,
    records_ptr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two >= the number of chunks
):
    """Write SUM and TIES, and for rows with top-k or top-p COUNTS and MASSES. There is one program
    per row and chunk."""
    chunk = tl.program_id(1)
    row_ptr = rows_ptr + tl.program_id(0) * NUM_COLUMNS
    records_ptr = _records_of_row(records_ptr, VOCAB, CHUNK)
    scores, _ = _load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, bins = _weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    record_ptr = records_ptr + chunk * RECORD_SIZE
    tl.store(record_ptr + SUM, tl.sum(weights))
    tl.store(record_ptr + TIES, 0.0)
    if (tl.load(row_ptr + TOP_K) < VOCAB) | (tl.load(row_ptr + TOP_P) < 1):
        for b in tl.static_range(BINS):
            count = tl.sum((bins <= b).to(tl.int32))
            tl.store(record_ptr + COUNTS + b, count.to(tl.float64))
            tl.store(record_ptr + MASSES + b, tl.sum(tl.where(bins <= b, weights, 0.0)))


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
    records_ptr = _records_of_row(records_ptr, VOCAB, CHUNK)
    first, last = _candidate_bins(row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    scores, _ = _load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, bins = _weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
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
    records_ptr = _records_of_row(records_ptr, VOCAB, CHUNK)
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
def pick_tokens(
    scores_ptr,
    stride,
    rows_ptr,
    records_ptr,
    tokens_ptr,  # int32
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the chosen tokens: of a greedy row the likeliest, otherwise the first one at which the
    cumulative sum of the weights exceeds the draw's share of the total. If rounding puts a draw
    beyond the end, it is the last token that is kept, or the vocabulary's last token if the row has
    no finite score. There is one program per row."""
    row_ptr = rows_ptr + tl.program_id(0) * NUM_COLUMNS
    records_ptr = _records_of_row(records_ptr, VOCAB, CHUNK)
    if tl.load(row_ptr + TEMPERATURE) == 0:
        token = _likeliest(records_ptr, VOCAB, CHUNK, PADDED)
    else:
        token = _sample(scores_ptr, stride, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    place = tl.load(row_ptr + TOKEN_ROW).to(tl.int32)
    tl.store(tokens_ptr + place, tl.minimum(token, VOCAB - 1))  # NaN may have led to a larger one


@triton.jit
def _likeliest(records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr):
    """Return the token of the row's largest score, with the lowest id if there are several."""
    chunks = tl.arange(0, PADDED)
    is_chunk = chunks < (VOCAB + CHUNK - 1) // CHUNK
    ptrs = records_ptr + chunks * RECORD_SIZE + MAXIMUM
    maxima = tl.load(ptrs, mask=is_chunk, other=float("-inf"))
    _, chunk = tl.max(maxima, axis=0, return_indices=True)
    chunk = tl.minimum(chunk, (VOCAB - 1) // CHUNK)  # NaN may have led to a larger one
    return tl.load(records_ptr + chunk * RECORD_SIZE + BEST).to(tl.int32)


@triton.jit
def _sample(
    scores_ptr,
    stride,
    row_ptr,
    records_ptr,  # the row's records
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return the token at the row's draw, see :func:`pick_tokens`."""
    chunks = tl.arange(0, PADDED)
    is_chunk = chunks < (VOCAB + CHUNK - 1) // CHUNK
    sums = tl.load(records_ptr + chunks * RECORD_SIZE + SUM, mask=is_chunk, other=0.0)
    cumulative = tl.cumsum(sums, axis=0)
    target = tl.load(row_ptr + DRAW) * tl.sum(tl.where(chunks == PADDED - 1, cumulative, 0.0))
    chunk = _first_above(cumulative, sums, target, chunks)
    before = tl.sum(tl.where(chunks == chunk - 1, cumulative, 0.0))
    scores, token_ids = _load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, _ = _weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    threshold = tl.load(row_ptr + THRESHOLD)
    is_tie = weights == threshold
    ranks = tl.cumsum(is_tie.to(tl.int32), axis=0)
    is_kept = is_tie & (ranks <= tl.load(records_ptr + chunk * RECORD_SIZE + TIES))
    weights = tl.where(is_kept | (weights > threshold), weights, 0.0)
    token = _first_above(before + tl.cumsum(weights, axis=0), weights, target, token_ids)
    return tl.where(tl.max(weights) > 0, token, VOCAB - 1)


@triton.jit
def _first_above(cumulative, weights, target, places):
    """Return the first of ``places`` that has a weight and a cumulative sum above ``target``, else
    the last one that has a weight, else 0."""
    place = tl.min(tl.where((cumulative > target) & (weights > 0), places, NO_TOKEN))
    return tl.where(place < NO_TOKEN, place, tl.max(tl.where(weights > 0, places, 0)))


@triton.jit
def _records_of_row(records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    return records_ptr + tl.program_id(0) * ((VOCAB + CHUNK - 1) // CHUNK * RECORD_SIZE)


@triton.jit
def _load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Return the scores [CHUNK] of a chunk in their own dtype, and their token ids."""
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.load(row_ptr + SCORE_ROW).to(tl.int64) * stride + token_ids
    return tl.load(scores_ptr + place, mask=token_ids < VOCAB, other=float("-inf")), token_ids


@triton.jit
def _weights_and_bins(
    scores,
    row_ptr,
    records_ptr,  # the row's records
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return weights in FP64, and bins, which are BINS for a token of weight 0. Scores are divided
    before they are subtracted, as softmax does on a CPU, so that the same scores are equal."""
    chunks = tl.arange(0, PADDED)
    is_chunk = chunks < (VOCAB + CHUNK - 1) // CHUNK
    ptrs = records_ptr + chunks * RECORD_SIZE + MAXIMUM
    maximum = tl.max(tl.load(ptrs, mask=is_chunk, other=float("-inf")))
    temperature = tl.load(row_ptr + TEMPERATURE)
    logs = scores.to(tl.float64) / temperature - maximum / temperature
    weights = tl.exp(logs)
    is_kept = (weights > 0) & (weights >= tl.load(row_ptr + MIN_P))  # false for NaN
    bins = tl.minimum(-logs, BINS - 1.0).to(tl.int32)
    return tl.where(is_kept, weights, 0.0), tl.where(is_kept, bins, BINS)


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
