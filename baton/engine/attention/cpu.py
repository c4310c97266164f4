"""Attention on the CPU with torch's own kernels, over contexts gathered from the pool.

Decodes are computed as one batch, padded to the longest context. Prefill rows are computed one by
one, since their lengths differ too much for padding. Padding is set to zero: another request may
have left a NaN there, which would make the result NaN even with an attention weight of zero.
"""

import torch
from torch.nn import functional

from baton.engine.attention.base import PackedBatch
from baton.engine.attention.kv_format import decode_kv, encode_kv
from baton.engine.kv_pool import KvPool
from baton.engine.kv_scale import KvScale


class CpuAttention:
    def __init__(self, pool: KvPool) -> None:
        self._pool = pool.tensor
        self._scales = pool.scales
        self._block_tokens = pool.block_tokens

    def prepare(self, batch: PackedBatch) -> None:
        """Prepare the block tables of the decodes and the attention masks of all rows."""
        self._batch = batch
        self._blocks = batch.slots // self._block_tokens
        self._offsets = batch.slots % self._block_tokens
        decodes = batch.num_decodes
        self._decode_mask: torch.Tensor | None = None
        if decodes:
            contexts = batch.context_lengths[:decodes]
            num_blocks = -(-max(contexts) // self._block_tokens)
            self._decode_tables = batch.block_tables[:decodes, :num_blocks]
            length = num_blocks * self._block_tokens
            inside = torch.arange(length) < torch.tensor(contexts).view(-1, 1)
            self._decode_mask = inside.view(decodes, 1, 1, length)
            by_block = inside.view(decodes, num_blocks, self._block_tokens)
            is_used = by_block.any(dim=-1, keepdim=True)
            self._unused_blocks = torch.where(~is_used.flatten())[0]
            self._tails = torch.where(is_used & ~by_block)  # rows, blocks, offsets
        self._masks = [
            _causal(batch.context_lengths[row] - batch.starts[row], batch.starts[row])
            for row in range(decodes, batch.num_rows)
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pool, batch, scale = self._pool[:, layer], self._batch, self._scales[layer]
        pool[self._blocks, 0, self._offsets] = encode_kv(k, scale.key, pool)
        pool[self._blocks, 1, self._offsets] = encode_kv(v, scale.value, pool)
        output = torch.empty_like(q)
        decodes = batch.num_decodes
        if decodes:
            output[:decodes] = self._decode(pool, scale, q[:decodes])
        for index, row in enumerate(range(decodes, batch.num_rows)):
            tokens = slice(batch.offsets[row], batch.offsets[row + 1])
            output[tokens] = self._prefill(pool, scale, row, q[tokens], self._masks[index])
        return output

    def _decode(self, pool: torch.Tensor, scale: KvScale, q: torch.Tensor) -> torch.Tensor:
        """Compute attention for the decodes, whose queries ``q`` are [rows, heads, dim]. The query
        heads that share a KV head are treated as several queries of that one head, so that its keys
        and values need not be repeated."""
        rows, heads, dim = q.shape
        # [rows, blocks, 2, tokens, kv_heads, dim]
        context = decode_kv(pool[self._decode_tables], scale, q.dtype)
        context.flatten(0, 1).index_fill_(0, self._unused_blocks, 0)
        tail_rows, tail_blocks, tail_offsets = self._tails
        context[tail_rows, tail_blocks, :, tail_offsets] = 0
        keys, values = (context[:, :, part].flatten(1, 2).transpose(1, 2) for part in (0, 1))
        grouped = q.view(rows, keys.shape[1], -1, dim)
        attended = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._decode_mask
        )
        return attended.reshape(rows, heads, dim)

    def _prefill(
        self,
        pool: torch.Tensor,
        scale: KvScale,
        row: int,
        q: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention for one prefill row, whose queries ``q`` are [tokens, heads, dim]."""
        length = self._batch.context_lengths[row]
        table = self._batch.block_tables[row, : -(-length // self._block_tokens)]
        context = decode_kv(pool[table], scale, q.dtype)  # [blocks, 2, tokens, kv_heads, dim]
        keys, values = (
            context[:, part].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0) for part in (0, 1)
        )
        attended = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1)


def _causal(num_tokens: int, start: int) -> torch.Tensor | None:
    """Return the mask [num_tokens, start + num_tokens], true where a query may attend. Return None
    if ``start`` is 0: the mask is then a plain triangle, which torch applies by itself."""
    if start == 0:
        return None
    queries = torch.arange(start, start + num_tokens).view(-1, 1)
    return torch.arange(start + num_tokens).view(1, -1) <= queries
