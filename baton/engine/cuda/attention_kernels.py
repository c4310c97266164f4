"""Triton kernels over the paged pool ``[num_blocks, layers, 2, block_tokens, kv_heads, dim]``.

All kernels take the pool as a flat pointer to one layer's part, and find token ``p`` of a row in
block ``table[p // block_tokens]`` at offset ``p % block_tokens``. The query heads that share a KV
head are computed together, so that each key and value is read once (a group of G heads makes G
queries per token). Softmax runs online in FP32 (Milakov and Gimelshein 2018; Dao et al. 2022,
algorithm 1); decodes split long contexts over programs and combine the parts afterwards (Dao et al.
2023, "Flash-Decoding"). Exponentials have base 2, because the hardware has an instruction for that.
Keys and values from a pool in FP8 (E4M3) are converted in registers, and multiplied in the queries'
dtype.

With PER_ROW, each row has an attention window (``baton.core.attention_window``): the keys between
its sink tokens and the recent tokens are skipped. SINKS are learned scores, which are no tokens.
"""

import triton
import triton.language as tl

from baton.engine.cuda.e4m3_kernels import from_pool_dtype, to_pool_dtype

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    k_ptr,  # [num_tokens, kv_heads, dim], contiguous
    v_ptr,
    layer_ptr,
    slots_ptr,  # [num_tokens]: block * BLOCK_TOKENS + offset
    block_stride,
    part_stride,
    key_factor,  # see to_pool_dtype()
    value_factor,
    WIDTH: tl.constexpr,  # kv_heads * dim
    BLOCK_TOKENS: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two >= WIDTH
    FP8: tl.constexpr,
):
    """Write a token's keys and values of all heads to the token's slot. There is one program per
    token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    target = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * WIDTH + columns
    source = token * WIDTH + columns
    k = to_pool_dtype(tl.load(k_ptr + source, mask=inside), key_factor, FP8)
    v = to_pool_dtype(tl.load(v_ptr + source, mask=inside), value_factor, FP8)
    tl.store(layer_ptr + target, k, mask=inside)
    tl.store(layer_ptr + part_stride + target, v, mask=inside)


@triton.jit
def _attend_range(
    q,  # [M, DIM_PADDED]
    positions,  # [M]: the queries' positions
    best,  # [M]: largest product of query and key so far
    total,  # [M]: sum of weights so far
    acc,  # [M, DIM_PADDED]: weighted values so far
    scale,  # log2(e) / sqrt(dim), times the scale of FP8 keys: turns products into scores
    begin,
    end,
    lowest,  # no query attends to keys before this one; read with WINDOW and PER_ROW only
    sink_tokens,  # but to these first ones; read with PER_ROW only
    recent_tokens,  # number of last keys that a query attends to; read with PER_ROW only
    gap_begin,  # keys [gap_begin, gap_begin + gap) are skipped; both are multiples of N
    gap,
    head_ptr,  # the layer's keys of this KV head
    table_ptr,  # block table of this row
    block_stride,
    part_stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,  # number of last keys that a query attends to, its own included; 0: all
    MASKED: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Attend to keys [begin, end), N at a time. If MASKED is false, no key is masked: all of these
    keys must be visible to every query, and their number must be a multiple of N.

    Keys that are all masked change no bit of the result: ``shrink`` is then exactly 1. So a query's
    result does not depend on how many keys its tile has beyond its own position."""
    columns = tl.arange(0, DIM_PADDED)
    for first in range(begin, end - gap, N):
        keys = first + tl.arange(0, N)
        if PER_ROW:
            keys += tl.where(first >= gap_begin, gap, 0)
        exists = keys < end
        if WINDOW > 0:
            exists = exists & (keys >= lowest)
        if PER_ROW:
            exists = exists & ((keys >= lowest) | (keys < sink_tokens))
        block = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
        offset = block * block_stride + keys % BLOCK_TOKENS * WIDTH
        address = head_ptr + offset[:, None] + columns[None, :]
        readable = exists[:, None] & (columns < DIM)[None, :]
        k = from_pool_dtype(tl.load(address, mask=readable, other=0.0), q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            visible = exists[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            if PER_ROW:
                is_recent = keys[None, :] > positions[:, None] - recent_tokens
                visible = visible & (is_recent | (keys < sink_tokens)[None, :])
            products = tl.where(visible, products, float("-inf"))
        new_best = tl.maximum(best, tl.max(products, axis=1))
        # The maximum of a query that has seen no key is -inf; use 0 so that -inf - -inf isn't NaN.
        finite = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(tl.fma(products, scale, -(finite * scale)[:, None]))
        shrink = tl.exp2((best - finite) * scale)
        v = tl.load(address + part_stride, mask=readable, other=0.0)
        v = from_pool_dtype(v, q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def prefill(
    q_ptr,  # [num_tokens, heads, dim], contiguous; the same shape for the result
    out_ptr,
    layer_ptr,
    tables_ptr,
    tiles_ptr,  # [num_tiles, 2]: row, first token of the row
    offsets_ptr,  # [num_rows + 1]
    starts_ptr,  # [num_rows]
    sinks_ptr,  # [heads]; read with SINKS only
    windows_ptr,  # [num_rows, 2]: sink tokens, recent tokens; read with PER_ROW only
    table_stride,
    block_stride,
    part_stride,
    scale,  # factor of the scores
    value_scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Compute prefill attention. There is one program per KV head and tile of a row's tokens. A
    tile has M // GROUP tokens with GROUP query heads each.

    Keys that all of a tile's queries see are not masked, unless ONE_LOOP, WINDOW or PER_ROW is set.
    Which keys these are depends on a prompt's chunks, and two loops may be compiled to different
    arithmetic. With ONE_LOOP, all keys are masked in the same loop, so that results do not depend
    on the chunks. With WINDOW or PER_ROW, hardly any key is seen by all.

    A sink counts as a key that was seen before all others, and whose value is zero."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    row_begin = tl.load(offsets_ptr + row)
    num_tokens = tl.load(offsets_ptr + row + 1) - row_begin
    start = tl.load(starts_ptr + row)
    tokens = first + tl.arange(0, M) // GROUP
    mine = (tl.arange(0, M) < M // GROUP * GROUP) & (tokens < num_tokens)
    heads = kv_head * GROUP + tl.arange(0, M) % GROUP
    columns = tl.arange(0, DIM_PADDED)
    line = (row_begin + tokens).to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
    address = line[:, None] * DIM + columns[None, :]
    readable = mine[:, None] & (columns < DIM)[None, :]
    q = tl.load(q_ptr + address, mask=readable, other=0.0)
    positions = start + tokens
    end = start + tl.minimum(first + M // GROUP, num_tokens)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start + first - WINDOW + 1, 0)
    sink_tokens, recent_tokens, gap_begin, gap = 0, 0, 0, 0
    if PER_ROW:
        sink_tokens = tl.load(windows_ptr + 2 * row)
        recent_tokens = tl.load(windows_ptr + 2 * row + 1)
        lowest = tl.maximum(start + first - recent_tokens + 1, 0)
        gap_begin = tl.minimum(tl.cdiv(sink_tokens, N) * N, lowest // N * N)
        gap = lowest // N * N - gap_begin
    masked_from = lowest // N * N
    if PER_ROW:
        masked_from = 0
    if not ONE_LOOP and WINDOW == 0 and not PER_ROW:
        masked_from = (start + first + 1) // N * N
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + heads, mask=mine, other=0.0).to(tl.float32) * LOG2_E / scale
        total += 1.0
    acc = tl.zeros([M, DIM_PADDED], tl.float32)
    head_ptr = layer_ptr + kv_head * DIM
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    if not ONE_LOOP and WINDOW == 0 and not PER_ROW:
        best, total, acc = _attend_range(
            q, positions, best, total, acc, scale, 0, masked_from, lowest, 0, 0, 0, 0, head_ptr,
            table_ptr, block_stride, part_stride, DIM, DIM_PADDED, WIDTH, BLOCK_TOKENS, N,
            PRECISION, WINDOW, MASKED=False, PER_ROW=False,
        )  # fmt: skip
    best, total, acc = _attend_range(
        q, positions, best, total, acc, scale, masked_from, end, lowest, sink_tokens, recent_tokens,
        gap_begin, gap, head_ptr, table_ptr, block_stride, part_stride, DIM, DIM_PADDED, WIDTH,
        BLOCK_TOKENS, N, PRECISION, WINDOW, MASKED=True, PER_ROW=PER_ROW,
    )  # fmt: skip
    tl.store(out_ptr + address, (acc / total[:, None] * value_scale).to(q.dtype), mask=readable)


@triton.jit
def _lowest_key(context, WINDOW: tl.constexpr):
    """Return the first key that the last token of a context attends to."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0)
    return lowest


@triton.jit
def _skipped_splits(context, windows_ptr, row, SPLIT: tl.constexpr):
    """Return the first split that is skipped between a row's sink tokens and the recent tokens of
    its last token, and how many are skipped."""
    lowest = tl.maximum(context - tl.load(windows_ptr + 2 * row + 1), 0)
    begin = tl.minimum(tl.cdiv(tl.load(windows_ptr + 2 * row), SPLIT), lowest // SPLIT)
    return begin, lowest // SPLIT - begin


@triton.jit(do_not_specialize=["max_splits", "table_stride"])
def decode(
    q_ptr,  # [num_decodes, heads, dim], contiguous
    parts_ptr,  # [num_decodes, heads, max_splits, dim] in FP32: each split's weighted mean
    sums_ptr,  # [num_decodes, heads, max_splits] in FP32: log2 of each split's sum of weights
    layer_ptr,
    tables_ptr,
    contexts_ptr,  # [num_decodes]
    windows_ptr,  # [num_rows, 2]: sink tokens, recent tokens; read with PER_ROW only
    max_splits,
    table_stride,
    block_stride,
    part_stride,
    scale,  # factor of the scores
    value_scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,  # a power of two >= GROUP, and at least the minimum of tl.dot
    N: tl.constexpr,
    SPLIT: tl.constexpr,  # keys per split; a multiple of N
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Compute decode attention of one row and KV head, over this program's splits of the context. A
    split has the same keys in any batch; only the assignment of splits to programs depends on the
    batch. Splits before the window are skipped."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts_ptr + row)
    members = tl.arange(0, M)
    columns = tl.arange(0, DIM_PADDED)
    line = row.to(tl.int64) * (tl.num_programs(1) * GROUP) + kv_head * GROUP + members
    inside = (members < GROUP)[:, None] & (columns < DIM)[None, :]
    q = tl.load(q_ptr + line[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    positions = tl.full([M], 0, tl.int32) + (context - 1)
    lowest = _lowest_key(context, WINDOW)
    first_split = lowest // SPLIT + tl.program_id(2)
    sink_tokens, recent_tokens, skipped_from, num_skipped = 0, 0, 0, 0
    if PER_ROW:
        sink_tokens = tl.load(windows_ptr + 2 * row)
        recent_tokens = tl.load(windows_ptr + 2 * row + 1)
        lowest = tl.maximum(context - recent_tokens, 0)
        first_split = tl.program_id(2)
        skipped_from, num_skipped = _skipped_splits(context, windows_ptr, row, SPLIT)
    end_split = tl.cdiv(context, SPLIT) - num_skipped
    for index in range(first_split, end_split, tl.num_programs(2)):
        split = index
        if PER_ROW:
            split += tl.where(index >= skipped_from, num_skipped, 0)
        begin = split * SPLIT
        first_key = tl.maximum(begin, lowest // N * N)
        if PER_ROW:
            first_key = tl.where(begin < sink_tokens, begin, first_key)
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DIM_PADDED], tl.float32)
        best, total, acc = _attend_range(
            q, positions, best, total, acc, scale, first_key, tl.minimum(begin + SPLIT, context),
            lowest, sink_tokens, recent_tokens, 0, 0,
            layer_ptr + kv_head * DIM, tables_ptr + row.to(tl.int64) * table_stride,
            block_stride, part_stride,
            DIM, DIM_PADDED, WIDTH, BLOCK_TOKENS, N, PRECISION, WINDOW, MASKED=True,
            PER_ROW=PER_ROW,
        )  # fmt: skip
        part = line * max_splits + split
        mean = acc / total[:, None] * value_scale
        tl.store(parts_ptr + part[:, None] * DIM + columns[None, :], mean, mask=inside)
        tl.store(sums_ptr + part, best * scale + tl.log2(total), mask=members < GROUP)


@triton.jit(do_not_specialize=["max_splits"])
def combine(
    parts_ptr,
    sums_ptr,
    out_ptr,  # [num_decodes, heads, dim]
    contexts_ptr,  # [num_decodes]
    sinks_ptr,  # [heads]; read with SINKS only
    windows_ptr,  # [num_rows, 2]: sink tokens, recent tokens; read with PER_ROW only
    max_splits,
    heads,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,  # splits per iteration; a power of two
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Combine the splits of a row and head: compute the mean of ``parts``, in which each split
    counts in proportion to its sum of weights. A sink counts as a split before all others, whose
    mean is zero. The splits are added in their order. There is one program per row and head. A
    padding row, which has no context, gets zeros."""
    line = tl.program_id(0).to(tl.int64)
    context = tl.load(contexts_ptr + line // heads)
    splits = tl.cdiv(context, SPLIT)
    columns = tl.arange(0, DIM_PADDED)
    best = float("-inf")
    total = 0.0
    if SINKS:
        best = tl.load(sinks_ptr + line % heads).to(tl.float32) * LOG2_E
        total = 1.0
    acc = tl.zeros([DIM_PADDED], tl.float32)
    skipped_from, num_skipped = 0, 0
    if PER_ROW:
        skipped_from, num_skipped = _skipped_splits(context, windows_ptr, line // heads, SPLIT)
    for first in range(_lowest_key(context, WINDOW) // SPLIT, splits - num_skipped, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        if PER_ROW:
            index += tl.where(index >= skipped_from, num_skipped, 0)
        exists = index < splits
        sums = tl.load(sums_ptr + line * max_splits + index, mask=exists, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(sums, axis=0))
        weights = tl.exp2(sums - new_best)
        shrink = tl.exp2(best - new_best)
        address = (line * max_splits + index)[:, None] * DIM + columns[None, :]
        readable = exists[:, None] & (columns < DIM)[None, :]
        parts = tl.load(parts_ptr + address, mask=readable, other=0.0)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(parts * weights[:, None], axis=0)
        best = new_best
    mean = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + line * DIM + columns, mean, mask=columns < DIM)
