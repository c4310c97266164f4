"""The KV of an 8B model in host memory, as the pool of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
import xxhash

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import CodecSpeed, KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.errors import Invalid
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_codecs
from baton.transport.host_memory import HostMemory
from baton.worker.codec_speeds import measure_codec_speeds
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from benchmarks.machine import SYSTEM_CLOCK

BLOCK_TOKENS = 16
FORMAT = BlockFormat("bfloat16", 36, BLOCK_TOKENS, 8, 128)
KV_BYTES_PER_TOKEN = FORMAT.size_bytes // BLOCK_TOKENS
STAGING_BYTES = 256 * 2**20
PROCESS_BYTES = 600 * 2**20
"""The memory of a process beside its blocks: mostly torch, which measures the codecs."""

NUM_DISTINCT_BLOCKS = 64
LAYOUT_NAME = "bfloat16[36x2x16x8x128]"
"""The layout as workers announce it, so that the store knows the format of raw blocks."""

SEED = 1


@dataclass(frozen=True)
class BenchPool:
    """Blocks in host memory, and the staging area behind them."""

    memory: HostMemory
    layout: KvLayout
    staging: StagingArea


def new_pool(num_blocks: int) -> BenchPool:
    """Allocate a pool of ``num_blocks`` blocks. Its pages are not touched yet."""
    size = num_blocks * FORMAT.size_bytes
    memory = HostMemory("codec-links", size + STAGING_BYTES)
    range_checksums = partial(_range_checksums, memory.view)
    layout = KvLayout(
        LAYOUT_NAME, FORMAT.size_bytes, CHECKSUM_XXH3, partial(_block_checksums, memory.view),
        memory.region.address, range_checksums,
    )  # fmt: skip
    return BenchPool(memory, layout, StagingArea(size, STAGING_BYTES))


def fill(pool: BenchPool, num_blocks: int) -> None:
    """Write normal values, with a scale per channel, to the blocks. The values repeat after
    NUM_DISTINCT_BLOCKS blocks."""
    chance = np.random.default_rng(SEED)
    blocks = np.frombuffer(pool.memory.view, dtype=np.uint8)[: num_blocks * FORMAT.size_bytes]
    blocks = blocks.reshape(num_blocks, FORMAT.size_bytes)
    channels = FORMAT.kv_heads * FORMAT.head_dim
    scales = np.exp(chance.normal(0, 1, (FORMAT.num_planes, 1, channels))).astype(np.float32)
    shape = (FORMAT.num_planes, BLOCK_TOKENS, channels)
    for index in range(min(num_blocks, NUM_DISTINCT_BLOCKS)):
        drawn = chance.standard_normal(shape, dtype=np.float32)
        upper = ((drawn * scales).view(np.uint32) >> 16).astype(np.uint16)
        blocks[index] = upper.ravel().view(np.uint8)
    for index in range(NUM_DISTINCT_BLOCKS, num_blocks):
        blocks[index] = blocks[index - NUM_DISTINCT_BLOCKS]


def touch(pool: BenchPool, first_block: int = 0) -> None:
    """Write to all pages from a block on, those of the staging area included."""
    np.frombuffer(pool.memory.view, dtype=np.uint8)[first_block * FORMAT.size_bytes :] = 0


def measured_codecs() -> tuple[dict[KvCodecName, BlockCodec], tuple[CodecSpeed, ...]]:
    """Open all codecs, and measure them as workers do when they start."""
    codecs = open_codecs(FORMAT)
    speeds = measure_codec_speeds(codecs, FORMAT, "cpu", frozenset(codecs), SYSTEM_CLOCK)
    return codecs, speeds


def prefix_keys(num_blocks: int) -> list[BlockKey]:
    """Return the keys of the blocks of a prompt."""
    return [BlockKey(index.to_bytes(16, "little")) for index in range(num_blocks)]


def block_of_key(key: BlockKey) -> BlockId:
    return BlockId(int.from_bytes(key, "little"))


def check_memory(num_tokens: int) -> None:
    """Raise Invalid unless two processes can have the KV of ``num_tokens`` tokens each."""
    needed = 2 * (num_tokens * KV_BYTES_PER_TOKEN + STAGING_BYTES + PROCESS_BYTES)
    available = psutil.virtual_memory().available
    if needed > available:
        raise Invalid(
            f"the KV of {num_tokens:,} tokens on both sides needs {needed / 2**30:.1f} GiB of "
            f"memory, but only {available / 2**30:.1f} GiB are available: wait for other programs "
            "to end, or measure fewer --tokens"
        )


def _range_checksums(view: memoryview, ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [int(xxhash.xxh3_64_intdigest(view[at : at + size])) for at, size in ranges]


def _block_checksums(view: memoryview, block_ids: Sequence[BlockId]) -> list[int]:
    size = FORMAT.size_bytes
    return _range_checksums(view, [(block_id * size, size) for block_id in block_ids])
