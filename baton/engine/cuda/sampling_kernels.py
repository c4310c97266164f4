"""Triton kernels that choose tokens from scores (logits, perhaps with penalties), for any
distribution in bounded time, without sorting the vocabulary.

Each row of scores is split into chunks of CHUNK tokens. The weight of a token is
exp((score - maximum) / temperature) in FP64, or 0 if min-p excludes the token. Sums of weights have
a fixed order, which does not depend on the batch. The kernels run in this order:

1. ``find_maxima`` finds each chunk's likeliest token.
2. ``sum_weights`` sums each chunk's weights. For top-k and top-p it also counts and sums the tokens
   in each of several bins, by the logarithm of their weights.
3. For top-k and top-p, the kernels of :mod:`baton.engine.cuda.filter_kernels` find the smallest
   weight that is kept, and replace each chunk's sum by the sum of the weights that are kept.
4. ``pick_tokens`` inverts the cumulative distribution at each row's random draw.

All need a table of the rows' parameters, ``rows_ptr`` [num_rows, NUM_COLUMNS] in FP64, and one
record for each row and chunk, ``records_ptr`` [num_rows, num_chunks, RECORD_SIZE] in FP64.
``scores_ptr`` is FP32 or FP64, with ``stride`` numbers from row to row.
"""

import triton
import triton.language as tl

SCORE_ROW = tl.constexpr(0)
"""Columns of the table. First the index of the row in the scores, and in the chosen tokens."""
TOKEN_ROW = tl.constexpr(1)
TEMPERATURE = tl.constexpr(2)  # 0 in a greedy row, which only find_maxima and pick_tokens process
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

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def find_maxima(
    scores_ptr, stride, rows_ptr, records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Write MAXIMUM and BEST; of equal scores, the lowest id is BEST. There is one program per row
    and chunk."""
    chunk = tl.program_id(1)
    row_ptr = rows_ptr + tl.program_id(0) * NUM_COLUMNS
    scores, _ = load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    maximum, place = tl.max(scores, axis=0, return_indices=True)
    record_ptr = records_of_row(records_ptr, VOCAB, CHUNK) + chunk * RECORD_SIZE
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
    records_ptr = records_of_row(records_ptr, VOCAB, CHUNK)
    scores, _ = load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, bins = weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
    record_ptr = records_ptr + chunk * RECORD_SIZE
    tl.store(record_ptr + SUM, tl.sum(weights))
    tl.store(record_ptr + TIES, 0.0)
    if (tl.load(row_ptr + TOP_K) < VOCAB) | (tl.load(row_ptr + TOP_P) < 1):
        for b in tl.static_range(BINS):
            count = tl.sum((bins <= b).to(tl.int32))
            tl.store(record_ptr + COUNTS + b, count.to(tl.float64))
            tl.store(record_ptr + MASSES + b, tl.sum(tl.where(bins <= b, weights, 0.0)))


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
    records_ptr = records_of_row(records_ptr, VOCAB, CHUNK)
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
    scores, token_ids = load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB, CHUNK)
    weights, _ = weights_and_bins(scores, row_ptr, records_ptr, VOCAB, CHUNK, PADDED)
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
def records_of_row(records_ptr, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    return records_ptr + tl.program_id(0) * ((VOCAB + CHUNK - 1) // CHUNK * RECORD_SIZE)


@triton.jit
def load_scores(scores_ptr, stride, row_ptr, chunk, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Return the scores [CHUNK] of a chunk in their own dtype, and their token ids."""
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.load(row_ptr + SCORE_ROW).to(tl.int64) * stride + token_ids
    return tl.load(scores_ptr + place, mask=token_ids < VOCAB, other=float("-inf")), token_ids


@triton.jit
def weights_and_bins(
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
