"""Fused Triton kernels for the operations between a layer's matrix products. Each makes one pass
over memory.

Arithmetic is in FP32; ``.to(x.dtype)`` rounds wherever transformers does, so that results equal
those of torch's separate kernels. Rows are tokens; no row depends on the rest of the batch.
"""

import triton
import triton.language as tl

from baton.engine.cuda.e4m3_kernels import to_pool_dtype


@triton.jit
def norm(
    x_ptr,  # [num_tokens, SIZE], contiguous
    update_ptr,  # the same shape; read with ADD only
    weight_ptr,  # [SIZE]
    out_ptr,  # the same shape as x
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two >= SIZE
    ADD: tl.constexpr,  # x += update, in place, before the norm
    OFFSET: tl.constexpr,  # added to the weight
    ROUNDS_LAST: tl.constexpr,  # rounded after the multiplication by the weight only
):
    """Compute RMSNorm. There is one program per token."""
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    if ADD:
        update = tl.load(update_ptr + place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    wide *= scale
    if not ROUNDS_LAST:
        wide = wide.to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + place, (weight * wide).to(x.dtype), mask=inside)


@triton.jit
def _rounded_norm(
    x, scale, weight_ptr, columns, inside,
    NORMED: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_LAST: tl.constexpr,
):  # fmt: skip
    """Return ``x`` [heads, dim] normalized and multiplied by the norm's weight (if NORMED), in
    FP32 but rounded to the dtype of ``x``."""
    wide = x.to(tl.float32)
    if NORMED:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
        wide *= scale[:, None]
        if not ROUNDS_LAST:
            wide = wide.to(x.dtype).to(tl.float32)
        wide = (wide * weight[None, :]).to(x.dtype).to(tl.float32)
    return wide


@triton.jit
def _normed_and_rotated(
    line_ptr,  # the token's first head
    weight_ptr,
    cos_ptr,  # cosines of the token's position
    sin_ptr,
    eps,
    heads,  # [HEADS]: indices of the heads
    exists,  # [HEADS]: whether there is such a head
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_LAST: tl.constexpr,
):
    """Return heads of one token [HEADS, DIM_PADDED], normalized and rotated by the token's
    position. Each head is read twice, as it is and with its halves swapped; the second read hits
    the L1/L2 cache."""
    columns = tl.arange(0, DIM_PADDED)
    inside = columns < DIM
    swapped = tl.where(columns < DIM // 2, columns + DIM // 2, columns - DIM // 2)
    readable = exists[:, None] & inside[None, :]
    x = tl.load(line_ptr + heads[:, None] * DIM + columns[None, :], mask=readable, other=0.0)
    y = tl.load(line_ptr + heads[:, None] * DIM + swapped[None, :], mask=readable, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
    x_normed = _rounded_norm(x, scale, weight_ptr, columns, inside, NORMED, OFFSET, ROUNDS_LAST)
    y_normed = _rounded_norm(y, scale, weight_ptr, swapped, inside, NORMED, OFFSET, ROUNDS_LAST)
    cos = tl.load(cos_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sin = tl.where(columns < DIM // 2, -sin, sin)
    kept = (x_normed * cos[None, :]).to(x.dtype).to(tl.float32)
    crossed = (y_normed * sin[None, :]).to(x.dtype).to(tl.float32)
    return (kept + crossed).to(x.dtype)


@triton.jit
def norm_rope_write_kv(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, DIM], contiguous
    q_ptr,  # [num_tokens, NUM_HEADS, DIM]: the result
    layer_ptr,  # of the pool; see attention_kernels
    q_weight_ptr,  # [DIM]; read with NORMED only
    k_weight_ptr,
    cos_ptr,  # [positions, DIM]
    sin_ptr,
    positions_ptr,  # [num_tokens]
    slots_ptr,  # [num_tokens]: block * BLOCK_TOKENS + offset; below 0: not written
    block_stride,
    part_stride,
    key_factor,  # see attention_kernels.to_pool_dtype
    value_factor,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,  # as in norm()
    ROUNDS_LAST: tl.constexpr,
    FP8: tl.constexpr,  # whether the pool is in FP8
):
    """Normalize and rotate queries and keys, and write keys and values to the pool. There is one
    program per token and group of HEADS heads: first the groups of query heads, then the groups of
    KV heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line_ptr = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * DIM)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptr += position * DIM
    sin_ptr += position * DIM
    columns = tl.arange(0, DIM_PADDED)
    query_parts = tl.cdiv(NUM_HEADS, HEADS)
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        q = _normed_and_rotated(
            line_ptr, q_weight_ptr, cos_ptr, sin_ptr, eps, heads, heads < NUM_HEADS,
            DIM, DIM_PADDED, NORMED, OFFSET, ROUNDS_LAST,
        )  # fmt: skip
        target = (token * NUM_HEADS + heads)[:, None] * DIM + columns[None, :]
        inside = (heads < NUM_HEADS)[:, None] & (columns < DIM)[None, :]
        tl.store(q_ptr + target, q, mask=inside)
    else:
        heads = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        line_ptr += NUM_HEADS * DIM
        k = _normed_and_rotated(
            line_ptr, k_weight_ptr, cos_ptr, sin_ptr, eps, heads, heads < NUM_KV_HEADS,
            DIM, DIM_PADDED, NORMED, OFFSET, ROUNDS_LAST,
        )  # fmt: skip
        slot = tl.load(slots_ptr + token).to(tl.int64)
        inside = (heads < NUM_KV_HEADS)[:, None] & (columns < DIM)[None, :] & (slot >= 0)
        across = heads[:, None] * DIM + columns[None, :]
        v = tl.load(line_ptr + NUM_KV_HEADS * DIM + across, mask=inside, other=0.0)
        line = slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * (NUM_KV_HEADS * DIM)
        k, v = to_pool_dtype(k, key_factor, FP8), to_pool_dtype(v, value_factor, FP8)
        tl.store(layer_ptr + line + across, k, mask=inside)
        tl.store(layer_ptr + line + part_stride + across, v, mask=inside)


@triton.jit
def activate(
    gate_up_ptr,  # [num_tokens, 2 * SIZE], contiguous
    out_ptr,  # [num_tokens, SIZE]
    SIZE: tl.constexpr,
    N: tl.constexpr,
    GELU: tl.constexpr,  # instead of SiLU
):
    """Compute SiLU(gate) * up, or GELU(gate) * up in its approximation by tanh, which is x / (1 +
    e^-2y) for y = sqrt(2 / pi) (x + 0.044715 x^3). There is one program per token and N columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < SIZE
    source = token * (2 * SIZE) + columns
    gate = tl.load(gate_up_ptr + source, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + source + SIZE, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    exponent = wide
    if GELU:
        exponent = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    own = (wide / (1.0 + tl.exp(-exponent))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, (own * up).to(gate.dtype), mask=inside)
