"""Checks and times the codecs of KV blocks on a GPU; run by ``gpu_check``."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.engine.kv_codecs import open_pool_codecs
from baton.engine.kv_pool import KvPool
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import parse_layout
from baton.kv_codec.registry import open_portable_codecs
from tests.unit import gpu_codec_cases
from tests.unit.cuda_cases import make_config
from tools.gpu_speed import copy_rate
from tools.gpu_timing import GpuTableRow, device, rows_or_error

NUM_CHANGES = 200
"""Broken encodings per codec."""

ESCAPES = range(61)
SHAPE = (36, 2, 16, 8, 128)
"""A block of Qwen3-8B."""

SIZES = {"an export's chunk": 16 * 2**20, "256 MiB": 256 * 2**20}
"""The KV that is encoded at once. The larger does not fit in the L2 cache."""


def codecs_are_right() -> Iterator[GpuTableRow]:
    """Compare encodings and decoded blocks with NumPy's, and use a pool as a worker does."""
    checks = gpu_codec_cases.all_checks(
        [*gpu_codec_cases.SMALL_FORMATS, *gpu_codec_cases.LARGE_FORMATS],
        NUM_CHANGES,
        ESCAPES,
        device(),
    )
    for name, check in checks.items():
        lines = (line.partition(": ") for line in check())
        rows = (GpuTableRow(f"{name}: {what}", result) for what, _, result in lines)
        yield from rows_or_error(name, rows)
    yield from rows_or_error("codecs of a pool", _pool_rows())


def _pool_rows() -> Iterator[GpuTableRow]:
    """Encode a block of a pool into the staging area, compare the checksum, and decode it into
    another block."""
    from baton.engine.checksum import range_checksums, weighted_sums

    pool = KvPool(
        make_config(4, 2, 64, True),
        num_blocks=8,
        block_tokens=16,
        dtype=torch.bfloat16,
        device=device(),
        staging_bytes=None,
    )
    pool.tensor.normal_()
    torch.cuda.synchronize()
    block_format = parse_layout(pool.layout)
    assert block_format is not None
    portable = open_portable_codecs(block_format)
    staged = len(pool.memory) - pool.staging_bytes
    block = pool.tensor[3].cpu().view(torch.uint8).numpy().ravel()
    for name, codec in open_pool_codecs(pool).items():
        (size,) = codec.encode([pool.address + 3 * pool.block_bytes], [pool.address + staged])
        encoding = gpu_codec_cases.encode_on_host(portable[name], block)
        padded = np.frombuffer(encoding + bytes(-size % 4), np.uint8).copy()
        checksums = weighted_sums(torch.from_numpy(padded)[None])
        is_same = range_checksums(pool, [(staged, size)]) == checksums
        valid = codec.decode(
            [pool.address + staged], [size], [pool.address + BlockId(5) * pool.block_bytes]
        )
        decoded = pool.tensor[5].cpu().view(torch.uint8).numpy().tobytes()
        wanted = gpu_codec_cases.decode_on_host(portable[name], encoding, pool.block_bytes)
        ok = is_same and valid == [True] and decoded == wanted
        yield GpuTableRow(f"{name} from pool to pool", "equal" if ok else "differs", ok=ok)


def codec_speeds(rounds: int) -> Iterator[GpuTableRow]:
    """Time encoding and decoding of normally distributed KV in BF16, from the call to its return,
    beside a copy of the same KV within the device."""
    for what, size_bytes in SIZES.items():
        for name in (each for each in KvCodecName if each is not KvCodecName.NONE):
            yield from rows_or_error(f"{name}, {what}", _speed_rows(name, what, size_bytes, rounds))


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
