"""Tests that the KV cache is laid out so that each block, with the parts of all layers and ranks,
is contiguous in memory."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from baton.errors import Invalid
from baton.vllm_engine.kv_layout import PackedLayout, pack_kv_cache

PAGE = 64
"""The size in bytes of a page: one rank's part of one layer of a block."""

ATTENTION = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
BF16 = replace(ATTENTION, dtype=torch.bfloat16)
NON_CAUSAL = replace(ATTENTION, non_causal=True)
SINK = SinkFullAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sink_len=32
)
MAMBA = MambaSpec(block_size=32, shapes=((2, 8),), dtypes=(torch.float32,))


def uniform(*layers: KVCacheSpec) -> KVCacheSpec:
    """Return the spec into which vLLM combines layers that have the same kind of attention, but
    different sizes or dtypes."""
    specs = {str(index): layer for index, layer in enumerate(layers)}
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)


def tensor(num_blocks: int, *layers: str, page: int = PAGE) -> KVCacheTensor:
    """Return a tensor that holds all blocks of the first layer, then those of the next layer, and
    so on, as in vLLM's own layout."""
    return KVCacheTensor(
        size=num_blocks * page * len(layers),
        layers=list(layers),
        layer_stride=num_blocks * page,
        block_stride=page,
    )


def config(
    num_blocks: int,
    *tensors: KVCacheTensor,
    replicas: int = 1,
    specs: tuple[KVCacheSpec, ...] = (ATTENTION,),
) -> KVCacheConfig:
    layers = [layer for each in tensors for layer in each.layers]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=list(tensors),
        kv_cache_groups=[KVCacheGroupSpec(layers, spec) for spec in specs],
        kv_tp_replicas=replicas,
    )


def pack(*configs: KVCacheConfig) -> PackedLayout:
    return pack_kv_cache(list(configs), KVCacheLayout.LBHNC)


def places(layout: PackedLayout, rank: int) -> list[tuple[int, int, int]]:
    """Return the offset, layer stride and block stride of each tensor of a rank."""
    return [
        (each.offset, each.layer_stride, each.block_stride)
        for each in layout.configs[rank].kv_cache_tensors
    ]


def written_bytes(layout: PackedLayout) -> list[tuple[int, int]]:
    """Return a pair (block, address in the memory) for each byte of each block, over all layers and
    ranks."""
    return sorted(
        (block, each.offset + index * each.layer_stride + block * each.block_stride + byte)
        for each_config in layout.configs
        for each in each_config.kv_cache_tensors
        for index in range(len(each.layers))
        for block in range(layout.num_blocks)
        for byte in range(PAGE)
    )


def test_one_rank_has_the_layers_of_a_block_side_by_side() -> None:
    layout = pack(config(10, tensor(10, "a", "b", "c")))
    assert (layout.block_bytes, layout.num_blocks, layout.block_tokens) == (3 * PAGE, 10, 32)
    assert layout.kv_dtype == "float32"
    assert layout.name.startswith("vllm:") and layout.name.endswith(":float32[32:3x64]")
    assert places(layout, 0) == [(0, PAGE, 3 * PAGE)]
    assert layout.configs[0].kv_cache_tensors[0].size == 10 * 3 * PAGE
    assert written_bytes(layout) == [
        (byte // layout.block_bytes, byte) for byte in range(10 * 3 * PAGE)
    ]


def test_two_ranks_share_each_page() -> None:
    layout = pack(config(6, tensor(6, "a", "b")), config(5, tensor(5, "a", "b")))
    assert (layout.block_bytes, layout.num_blocks) == (4 * PAGE, 5)
    assert layout.name.endswith(":float32[32:2x128]")
    assert places(layout, 0) == [(0, 2 * PAGE, 4 * PAGE)]
    assert places(layout, 1) == [(PAGE, 2 * PAGE, 4 * PAGE)]
    assert [each.num_blocks for each in layout.configs] == [5, 5]
    assert written_bytes(layout) == [
        (byte // layout.block_bytes, byte) for byte in range(5 * 4 * PAGE)
    ]


def test_ranks_with_the_same_heads_share_their_place() -> None:
    ranks = [config(5, tensor(5, "a", "b"), replicas=2) for _ in range(4)]
    layout = pack(*ranks)
    assert layout.block_bytes == 4 * PAGE and layout.name.endswith("[32:2x128]")
    assert [places(layout, rank)[0][0] for rank in range(4)] == [0, 0, PAGE, PAGE]


def test_tensors_follow_one_another_in_a_block() -> None:
    first, second = tensor(4, "a"), tensor(4, "b", "c", page=2 * PAGE)
    layout = pack(config(4, first, second))
    assert layout.block_bytes == 5 * PAGE
    assert layout.name.endswith(":float32[32:1x64+2x128]")
    assert places(layout, 0) == [(0, PAGE, 5 * PAGE), (PAGE, 2 * PAGE, 5 * PAGE)]
    assert [each.size for each in layout.configs[0].kv_cache_tensors] == [4 * 5 * PAGE] * 2


def test_layers_of_different_shapes_share_a_block_table() -> None:
    wide = replace(ATTENTION, head_size=16)
    first, second = tensor(4, "a"), tensor(4, "b", page=2 * PAGE)
    layout = pack(config(4, first, second, specs=(uniform(ATTENTION, wide),)))
    assert (layout.block_bytes, layout.block_tokens, layout.kv_dtype) == (3 * PAGE, 32, "float32")
    assert places(layout, 0) == [(0, PAGE, 3 * PAGE), (PAGE, 2 * PAGE, 3 * PAGE)]


@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((ATTENTION, MAMBA), "FullAttentionSpec, MambaSpec"),
        ((MAMBA,), "MambaSpec"),
        ((SINK,), "SinkFullAttentionSpec"),  # vLLM reserves blocks for the attention sinks
        ((NON_CAUSAL,), "FullAttentionSpec"),
        ((uniform(ATTENTION, BF16),), "FullAttentionSpec"),
    ],
)
def test_models_with_other_kinds_of_blocks_are_refused(
    specs: tuple[KVCacheSpec, ...], kinds: str
) -> None:
    with pytest.raises(Invalid) as refused:
        pack(config(4, tensor(4, "a", "b"), specs=specs))
    assert f"the layers of the model have KV of different kinds ({kinds});" in str(refused.value)
    assert refused.value.param == "model"
