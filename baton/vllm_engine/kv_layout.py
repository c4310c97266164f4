"""Lays out vLLM's KV cache so that a block is contiguous over all layers."""

from dataclasses import dataclass, replace

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from baton.errors import Invalid

PAGED_ATTENTION = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
"""Kinds of layers in which a token's KV depends only on the tokens up to it, and lies in the block
of its position. Subclasses are not included: vLLM's own subclasses differ in one of these respects,
for example because they reserve blocks for themselves, reuse blocks, or depend on the length of the
prompt."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The layout of a block: ``block_bytes`` bytes, in which the pages of all layers, each with the
    heads of all ranks, follow one another. ``name`` describes the layout; workers can exchange
    blocks only if the names are equal. ``block_tokens`` is the number of tokens per block,
    ``kv_dtype`` the KV's data type. ``configs`` are the configs, one per rank, with which vLLM lays
    out its KV cache in this way."""

    name: str
    kv_dtype: str
    block_bytes: int
    block_tokens: int
    num_blocks: int
    configs: list[KVCacheConfig]


def pack_kv_cache(configs: list[KVCacheConfig], layout: KVCacheLayout) -> PackedLayout:
    """Change the KV cache configs of all ranks, in the order of their ranks, so that the ranks
    share one memory in which a block of all layers and ranks is contiguous. Return the layout.

    Raises Invalid if the model's KV cache is not one group of paged attention layers, as with
    recurrent (Mamba) layers, or if its attention can't use such blocks."""
    specs = _layer_specs(configs[0].kv_cache_groups)
    if any(isinstance(spec, MLAAttentionSpec) for spec in specs) and current_platform.is_cpu():
        raise Invalid(
            "the model has multi-head latent attention, whose kernels in vLLM's CPU backend need "
            "each layer's KV cache to be contiguous; with Baton, each block is contiguous instead",
            param="model",
        )
    # Attention on CPUs takes any block stride, also where vLLM's own layout has layers outermost.
    if not layout.is_block_compact or not (layout.is_block_outermost or current_platform.is_cpu()):
        raise Invalid(
            f"vLLM's attention needs the KV cache layout {layout.name}, in which a block's pages "
            "are not contiguous; choose another --attention-backend in engine_args",
            param="engine_args",
        )
    num_blocks = min(config.num_blocks for config in configs)
    num_shards = len(configs) // configs[0].kv_tp_replicas
    parts: list[str] = []
    offset = 0
    for index, tensor in enumerate(configs[0].kv_cache_tensors):
        shard_page = tensor.layer_stride if layout.is_block_outermost else tensor.block_stride
        page = shard_page * num_shards
        for rank, config in enumerate(configs):
            shard = rank // config.kv_tp_replicas
            placed = config.kv_cache_tensors[index]
            config.kv_cache_tensors[index] = replace(
                placed, layer_stride=page, offset=offset + shard * shard_page
            )
        parts.append(f"{len(tensor.layers)}x{page}")
        offset += page * len(tensor.layers)
    for config in configs:
        config.num_blocks = num_blocks
        config.kv_cache_tensors = [
            _with_strides(tensor, offset, num_blocks) for tensor in config.kv_cache_tensors
        ]
    spec = specs[0]
    dtype = str(spec.dtype).removeprefix("torch.")
    name = f"vllm:{layout.name}:{dtype}[{spec.block_size}:{'+'.join(parts)}]"
    return PackedLayout(name, dtype, offset, spec.block_size, num_blocks, configs)


def _layer_specs(groups: list[KVCacheGroupSpec]) -> list[AttentionSpec]:
    """Return vLLM's specs of the layers' KV: one spec for all layers, or one per layer. Raises
    Invalid unless all layers have paged attention with the same data type and share one block
    table."""
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    is_paged = all(
        type(spec) in PAGED_ATTENTION
        and spec.prefix_cacheable
        and not getattr(spec, "non_causal", False)
        for spec in specs
    )
    if len(groups) != 1 or not is_paged or len({spec.dtype for spec in specs}) != 1:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise Invalid(
            f"the layers of the model have KV of different kinds ({kinds}); engine vllm supports "
            "models whose layers all have causal, paged attention with one block table and one "
            "data type",
            param="model",
        )
    return specs


def _with_strides(tensor: KVCacheTensor, block_bytes: int, num_blocks: int) -> KVCacheTensor:
    return replace(tensor, size=block_bytes * num_blocks, block_stride=block_bytes)
