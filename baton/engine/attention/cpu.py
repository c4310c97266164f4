"""Attention on the CPU with torch's own kernels, over contexts gathered from the pool.

Decodes are computed as one batch, padded to the longest context. Prefill rows are computed one by
one, since their lengths differ too much for padding. Padding is set to zero: another request may
have left a NaN there, which would make the result NaN even with an attention weight of zero. In a
layer with a window, only the blocks from a row's first visible key on are gathered; with an
attention window, these and the blocks with sink tokens.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.engine.attention.base import PackedBatch
from baton.engine.attention.kv_format import decode_kv, encode_kv
from baton.engine.kv_pool import KvPool
from baton.engine.kv_scale import KvScale


class CpuAttention:
    def __init__(self, pool: KvPool, traits: DecoderTraits = LLAMA_TRAITS) -> None:
        self._pool = pool.tensor
        self._scales = pool.scales
        self._block_tokens = pool.block_tokens
        self._traits = traits
        self._places = pool.groups.places
        self._rules = {
            (group, traits.window(layer)) for layer, (group, _) in enumerate(self._places)
        }
        """The group and the window of each layer."""

    def prepare(self, batch: PackedBatch) -> None:
        """Prepare the block tables and the attention masks, for each group of layers and each
        window that they have."""
        self._batch = batch
        self._blocks = batch.slots // self._block_tokens
        self._offsets = batch.slots[0] % self._block_tokens
        decodes = batch.num_decodes
        self._decode_contexts = {
            (group, window): _decode_contexts(batch, group, window, self._block_tokens)
            for group, window in self._rules
            if decodes
        }
        self._prefill_contexts = {
            (group, window): [
                _prefill_context(batch, row, group, window, self._block_tokens)
                for row in range(decodes, batch.num_rows)
            ]
            for group, window in self._rules
        }

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group, place = self._places[layer]
        pool, batch, scale = self._pool[:, place], self._batch, self._scales[layer]
        pool[self._blocks[group], 0, self._offsets] = encode_kv(k, scale.key, pool)
        pool[self._blocks[group], 1, self._offsets] = encode_kv(v, scale.value, pool)
        output = torch.empty_like(q)
        decodes, rule = batch.num_decodes, (group, self._traits.window(layer))
        if decodes:
            contexts = self._decode_contexts[rule]
            output[:decodes] = self._decode(pool, scale, contexts, q[:decodes], sinks)
        for index, row in enumerate(range(decodes, batch.num_rows)):
            tokens = slice(batch.offsets[row], batch.offsets[row + 1])
            context = self._prefill_contexts[rule][index]
            output[tokens] = self._prefill(pool, scale, context, q[tokens], sinks)
        return output

    def _decode(
        self,
        pool: torch.Tensor,
        scale: KvScale,
        contexts: "_DecodeContexts",
        q: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention for the decodes, whose queries ``q`` are [rows, heads, dim]. The query
        heads that share a KV head are treated as several queries of that one head, so that its keys
        and values need not be repeated."""
        rows, heads, dim = q.shape
        # [rows, blocks, 2, tokens, kv_heads, dim]
        context = decode_kv(pool[contexts.tables], scale, q.dtype)
        context.flatten(0, 1).index_fill_(0, contexts.unused_blocks, 0)
        tail_rows, tail_blocks, tail_offsets = contexts.hidden
        context[tail_rows, tail_blocks, :, tail_offsets] = 0
        keys, values = (context[:, :, part].flatten(1, 2).transpose(1, 2) for part in (0, 1))
        grouped = q.view(rows, keys.shape[1], -1, dim)
        attended = self._attended(grouped, keys, values, contexts.mask, sinks)
        return attended.reshape(rows, heads, dim)

    def _prefill(
        self,
        pool: torch.Tensor,
        scale: KvScale,
        row: "_PrefillContext",
        q: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention for one prefill row, whose queries ``q`` are [tokens, heads, dim]."""
        context = decode_kv(pool[row.table], scale, q.dtype)  # [blocks, 2, tokens, kv_heads, dim]
        for blocks, offsets in row.hidden:
            context[blocks, :, offsets] = 0
        keys, values = (
            context[:, part].flatten(0, 1)[: row.length].transpose(0, 1).unsqueeze(0)
            for part in (0, 1)
        )
        attended = self._attended(q.transpose(0, 1).unsqueeze(0), keys, values, row.mask, sinks)
        return attended.squeeze(0).transpose(0, 1)

    def _attended(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of ``q`` [rows, heads, tokens, dim], or [rows, kv_heads, group, dim],
        over ``keys`` and ``values`` [rows, kv_heads, context, dim]. If ``mask`` is None, the tokens
        are the whole context, and each sees itself and what precedes it."""
        scale = self._traits.score_scale(q.shape[-1])
        if sinks is not None:
            q, keys, values, mask = _with_sinks(q, keys, values, mask, sinks / scale)
        return functional.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != keys.shape[1],
            scale=scale,
        )


@dataclass(frozen=True, slots=True)
class _DecodeContexts:
    """The blocks ``tables`` [rows, blocks] that decodes read in layers of one group with one
    window, and the ``mask`` [rows, 1, 1, keys] of what they see. ``unused_blocks`` are indices into
    the flat table; ``hidden`` are rows, blocks and offsets of hidden keys in the other blocks."""

    tables: torch.Tensor
    mask: torch.Tensor
    unused_blocks: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _PrefillContext:
    """The blocks ``table`` that a row reads, which have ``length`` keys up to its last token.
    ``hidden`` are the keys that no query sees: an index in ``table``, and offsets in this block.
    ``mask`` is [tokens, length], or None if each token sees all keys up to its own and the row
    begins at position 0."""

    table: torch.Tensor
    length: int
    hidden: tuple[tuple[int, slice], ...]
    mask: torch.Tensor | None


def _decode_contexts(
    batch: PackedBatch, group: int, window: int | None, block_tokens: int
) -> _DecodeContexts:
    rows = batch.num_decodes
    ends = torch.tensor(batch.context_lengths[:rows]).view(-1, 1)
    starts, sinks = torch.zeros_like(ends), torch.zeros_like(ends)
    if window is not None:
        starts = (ends - window).clamp(min=0)
    elif batch.attention_windows:
        windows = torch.tensor(batch.attention_windows[:rows])
        sinks, recent = windows[:, :1], windows[:, 1:]
        starts = (ends - recent).clamp(min=0)
    blocks = starts // block_tokens + torch.arange(_max_blocks(starts, ends, block_tokens))
    if sinks.any():
        num_sink_blocks = _max_blocks(torch.zeros_like(sinks), sinks.minimum(starts), block_tokens)
        sink_blocks = torch.arange(num_sink_blocks).expand(rows, -1)
        # A block with both sinks and recent tokens is read once.
        unread = batch.block_tables.shape[2]
        is_new = sink_blocks < starts // block_tokens
        blocks = torch.cat((torch.where(is_new, sink_blocks, unread), blocks), dim=1)
    num_blocks = blocks.shape[1]
    places = blocks.clamp(max=batch.block_tables.shape[2] - 1)
    positions = (blocks[:, :, None] * block_tokens + torch.arange(block_tokens)).flatten(1)
    inside = ((positions >= starts) | (positions < sinks)) & (positions < ends)
    by_block = inside.view(rows, num_blocks, block_tokens)
    is_used = by_block.any(dim=-1, keepdim=True)
    return _DecodeContexts(
        tables=batch.block_tables[group, :rows].gather(1, places),
        mask=inside.view(rows, 1, 1, -1),
        unused_blocks=torch.where(~is_used.flatten())[0],
        hidden=torch.where(is_used & ~by_block),
    )


def _prefill_context(
    batch: PackedBatch, row: int, group: int, window: int | None, block_tokens: int
) -> _PrefillContext:
    start, end = batch.starts[row], batch.context_lengths[row]
    sinks = 0
    if window is None and batch.attention_windows:
        sinks, window = batch.attention_windows[row]
    first = 0 if window is None else max(0, start - window + 1)
    first_block, sink_end = first // block_tokens, min(sinks, first)
    sink_blocks = min(-(-sink_end // block_tokens), first_block)
    keys = torch.cat(
        (torch.arange(sink_blocks * block_tokens), torch.arange(first_block * block_tokens, end))
    ).view(1, -1)
    mask = None
    if start > 0 or (window is not None and end > window):
        ages = torch.arange(start, end).view(-1, 1) - keys
        mask = ages >= 0
        if window is not None:
            mask &= (ages < window) | (keys < sinks)
    table = batch.block_tables[group, row]
    table = torch.cat((table[:sink_blocks], table[first_block : -(-end // block_tokens)]))
    hidden = [(sink_blocks, slice(0, first % block_tokens))]
    if sink_end >= first_block * block_tokens:  # the first recent token's block has sinks, too
        hidden = [(sink_blocks, slice(sink_end % block_tokens, first % block_tokens))]
    elif sink_end % block_tokens:
        hidden.append((sink_blocks - 1, slice(sink_end % block_tokens, block_tokens)))
    return _PrefillContext(table, keys.shape[1], tuple(hidden), mask)


def _max_blocks(starts: torch.Tensor, ends: torch.Tensor, block_tokens: int) -> int:
    """Return the maximum number of blocks with tokens of a row's range [start, end)."""
    return int((-(-ends // block_tokens) - starts // block_tokens).max())


def _with_sinks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key whose product with a query is its head's number in ``sinks`` [heads], and whose
    value is zero.

    Heads that share a KV head have different sinks, so one more dimension is added for each of
    them: a query has a 1 in its own, the new key has the sinks there, and other keys have zeros."""
    kv_heads, length = keys.shape[1:3]
    group = len(sinks) // kv_heads
    own = torch.eye(group, dtype=q.dtype)
    if q.shape[1] == len(sinks):
        extra = own.repeat(kv_heads, 1).view(1, -1, 1, group).expand(*q.shape[:3], -1)
    else:
        extra = own.expand(*q.shape[:2], -1, -1)
    keys = functional.pad(keys, (0, group, 0, 1))
    keys[:, :, length, -group:] = sinks.view(kv_heads, group)
    if mask is None:
        mask = torch.ones(q.shape[2], length, dtype=torch.bool).tril()
    mask = functional.pad(mask, (0, 1), value=True)
    return torch.cat((q, extra), dim=-1), keys, functional.pad(values, (0, 0, 0, 1)), mask
