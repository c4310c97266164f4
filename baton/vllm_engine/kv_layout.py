"""Places vLLM's KV cache so that one block of all layers is contiguous."""

from dataclasses import dataclass, replace

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from baton.errors import Invalid


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The layout of a block: ``block_bytes`` bytes, in which the pages of all layers, each with the
    heads of all ranks, follow one another. ``name`` describes it; workers with equal names can
    exchange blocks. ``block_tokens`` is the number of tokens per block, ``kv_dtype`` the KV's data
    type. ``configs`` are vLLM's configs of the KV cache, one per rank, that give it this layout."""

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
    groups = configs[0].kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, AttentionSpec):
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise Invalid(
            f"the layers of the model have KV of different kinds or shapes ({kinds}); engine vllm "
            "supports models whose layers all have paged attention of one shape",
            param="model",
        )
    if isinstance(groups[0].kv_cache_spec, MLAAttentionSpec) and current_platform.is_cpu():
        raise Invalid(
            "the model has multi-head latent attention, whose kernels in vLLM's CPU backend need "
            "each layer's KV cache to be contiguous; Baton keeps the blocks contiguous",
            param="model",
        )
    if not layout.is_block_compact:
        raise Invalid(
            f"vLLM's attention needs the KV cache layout {layout.name}, in which the pages of a "
            "block are not contiguous; choose another --attention-backend in engine_args",
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
    spec = groups[0].kv_cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    name = f"vllm:{layout.name}:{dtype}[{spec.block_size}:{'+'.join(parts)}]"
    return PackedLayout(name, dtype, offset, spec.block_size, num_blocks, configs)


def _with_strides(tensor: KVCacheTensor, block_bytes: int, num_blocks: int) -> KVCacheTensor:
    return replace(tensor, size=block_bytes * num_blocks, block_stride=block_bytes)
