"""Computes attention directly from its definition, as the reference that other backends are tested
against."""

import torch

from baton.checkpoints.decoder_traits import LLAMA_TRAITS, DecoderTraits
from baton.engine.attention.base import PackedBatch
from baton.engine.attention.kv_format import decode_kv, encode_kv
from baton.engine.kv_pool import KvPool


class ReferenceAttention:
    """Computes attention row by row in FP32. It is slow, and meant for tests only."""

    def __init__(self, pool: KvPool, traits: DecoderTraits = LLAMA_TRAITS) -> None:
        self._traits = traits
        self._pool = pool.tensor
        self._scales = pool.scales
        self._block_tokens = pool.block_tokens
        self._places = pool.groups.places

    def prepare(self, batch: PackedBatch) -> None:
        self._batch = batch

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, scale = self._batch, self._scales[layer]
        group, place = self._places[layer]
        slots, tables = batch.slots[group], batch.block_tables[group]
        blocks, offsets = slots // self._block_tokens, slots % self._block_tokens
        self._pool[blocks, place, 0, offsets] = encode_kv(k, scale.key, self._pool)
        self._pool[blocks, place, 1, offsets] = encode_kv(v, scale.value, self._pool)
        output = torch.empty_like(q)
        for row in range(batch.num_rows):
            tokens = slice(batch.offsets[row], batch.offsets[row + 1])
            cache = self._pool[tables[row], place]  # [blocks, 2, tokens, heads, dim]
            cache = decode_kv(cache, scale, torch.float32)
            keys, values = (
                cache[:, part].flatten(0, 1)[: batch.context_lengths[row]].float()
                for part in (0, 1)
            )
            window, num_sinks = self._traits.window(layer), 0
            if batch.attention_windows:
                assert window is None, "a model with sliding windows"
                num_sinks, window = batch.attention_windows[row]
            if window is not None:
                first = max(0, batch.starts[row] - window + 1)
                keys[num_sinks:first], values[num_sinks:first] = 0, 0
            attended = _attend(
                q[tokens].float() * self._traits.score_scale(q.shape[-1]),
                keys,
                values,
                batch.starts[row],
                window,
                None if sinks is None else sinks.float(),
                num_sinks,
            )
            output[tokens] = attended.to(q.dtype)
        return output


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    window: int | None,
    sinks: torch.Tensor | None,
    num_sink_tokens: int,
) -> torch.Tensor:
    """Compute attention of ``q`` [tokens, heads, dim], which are scaled already and whose first
    token is at position ``start``, over ``keys`` and ``values`` [context, kv_heads, dim]. Query
    head h reads KV head h // (heads / kv_heads)."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,chd->htc", q, keys)
    ages = torch.arange(start, start + q.shape[0])[:, None] - torch.arange(keys.shape[0])[None, :]
    hidden = ages < 0
    if window is not None:
        is_sink = torch.arange(keys.shape[0])[None, :] < num_sink_tokens
        hidden |= (ages >= window) & ~is_sink
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("htc,chd->thd", weights, values)
