"""Measures the codecs of KV blocks on a GPU."""

import time
from collections.abc import Callable, Iterator

import torch

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import parse_layout
from benchmarks.gpu.kernels import copy_rate
from benchmarks.gpu.timing import GpuTableRow, device

SHAPE = (36, 2, 16, 8, 128)
"""A block of Qwen3-8B."""

SIZES = {"an export's chunk": 16 * 2**20, "256 MiB": 256 * 2**20}
"""The KV that is encoded at once. The larger does not fit in the L2 cache."""


def codec_speeds(rounds: int) -> Iterator[GpuTableRow]:
    """Time encoding and decoding of normally distributed KV in BF16, from the call to its return,
    beside a copy of the same KV within the device."""
    for what, size_bytes in SIZES.items():
        for name in (each for each in KvCodecName if each is not KvCodecName.NONE):
            yield from _speed_rows(name, what, size_bytes, rounds)


def _speed_rows(
    name: KvCodecName, what: str, size_bytes: int, rounds: int
) -> Iterator[GpuTableRow]:
    from baton.engine.cuda.kv_codec.registry import open_gpu_codecs

    block_format = parse_layout(f"bfloat16[{'x'.join(map(str, SHAPE))}]")
    assert block_format is not None
    codec: BlockCodec = open_gpu_codecs(block_format, device())[name]
    num_blocks = size_bytes // block_format.size_bytes
    blocks = torch.randn(num_blocks, *SHAPE, device=device()).bfloat16()
    encoded = torch.empty(num_blocks, block_format.size_bytes, dtype=torch.uint8, device=device())
    decoded = torch.empty_like(blocks)
    sources, targets, outputs = map(_addresses, (blocks, encoded, decoded))
    torch.cuda.synchronize()
    sizes = codec.encode(sources, targets)
    assert all(sizes) and all(codec.decode(targets, sizes, outputs))
    for verb, action in {
        "encode": lambda: codec.encode(sources, targets),
        "decode": lambda: codec.decode(targets, sizes, outputs),
    }.items():
        seconds = _fastest(action, rounds)
        result = (
            f"{blocks.nbytes / seconds / 1e9:.0f} GB/s of KV, {blocks.nbytes / sum(sizes):.2f} x"
        )
        share = 2 * blocks.nbytes / copy_rate() / seconds
        yield GpuTableRow(f"{name}: {verb} {what}", result, seconds, share, "a copy's speed")


def _addresses(rows: torch.Tensor) -> list[int]:
    return [rows.data_ptr() + number * rows[0].nbytes for number in range(len(rows))]


def _fastest(action: Callable[[], object], rounds: int) -> float:
    """Return the least time of a call. Codecs have a stream of their own and wait for it, so the
    host's clock measures them."""
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
