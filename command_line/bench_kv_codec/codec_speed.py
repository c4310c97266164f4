"""Measures the ratio and the speed of codecs on given blocks, in one thread."""

import ctypes
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.clock import SystemClock
from baton.core.kv_codec import KvCodecName
from baton.kv_codec.base import BlockCodec

Blocks = npt.NDArray[np.uint8]
"""The bytes of blocks, [num_blocks, block_bytes]."""

ROUNDS = 7
GENERAL_ROUNDS = 2
"""Rounds of a general-purpose compressor, which is a hundred times slower."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Raw bytes by encoded bytes, where a block that does not become smaller counts as it is; and
    raw bytes per second, in the fastest of several rounds."""

    name: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float


def measure_speeds(codecs: Mapping[KvCodecName, BlockCodec], blocks: Blocks) -> list[CodecSpeed]:
    """Measure a copy, the codecs, and a general-purpose compressor on the same blocks."""
    speeds = [_measure_copy(blocks)]
    speeds += [_measure_codec(codec, blocks) for codec in codecs.values()]
    return [*speeds, _measure_general(blocks)]


def _measure_codec(codec: BlockCodec, blocks: Blocks) -> CodecSpeed:
    encoded, decoded = np.zeros_like(blocks), np.zeros_like(blocks)
    sources, targets, results = (_addresses(each) for each in (blocks, encoded, decoded))
    sizes = codec.encode(sources, targets)
    used = [n for n, size in enumerate(sizes) if size]
    encode_seconds = _fastest(lambda: codec.encode(sources, targets), ROUNDS)
    smaller = [targets[n] for n in used], [sizes[n] for n in used], [results[n] for n in used]
    codec.decode(*smaller)
    decode_seconds = _fastest(lambda: codec.decode(*smaller), ROUNDS)
    total = sum(size or blocks.shape[1] for size in sizes)
    decoded_bytes = len(used) * blocks.shape[1]
    return CodecSpeed(
        codec.name.value,
        blocks.nbytes / total,
        blocks.nbytes / encode_seconds,
        decoded_bytes / decode_seconds,
    )


def _measure_copy(blocks: Blocks) -> CodecSpeed:
    target = np.zeros_like(blocks)
    pairs = list(zip(_addresses(blocks), _addresses(target), strict=True))

    def copy() -> None:
        for source, address in pairs:
            ctypes.memmove(address, source, blocks.shape[1])

    speed = blocks.nbytes / _fastest(copy, ROUNDS)
    return CodecSpeed("copy", 1.0, speed, speed)


def _measure_general(blocks: Blocks) -> CodecSpeed:
    name, compress, decompress = _general_compressor()
    raw = [block.tobytes() for block in blocks[: max(1, len(blocks) // 8)]]
    compressed = [compress(block) for block in raw]
    raw_bytes = len(raw) * blocks.shape[1]
    encode_seconds = _fastest(lambda: [compress(block) for block in raw], GENERAL_ROUNDS)
    decode_seconds = _fastest(lambda: [decompress(block) for block in compressed], GENERAL_ROUNDS)
    return CodecSpeed(
        name,
        raw_bytes / sum(len(block) for block in compressed),
        raw_bytes / encode_seconds,
        raw_bytes / decode_seconds,
    )


def _general_compressor() -> tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """Return zstd at level 1 if its module is installed; otherwise zlib at level 1."""
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        return "zlib -1", lambda data: zlib.compress(data, 1), zlib.decompress
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return "zstd -1", compressor.compress, decompressor.decompress


def _addresses(blocks: Blocks) -> Sequence[int]:
    first = int(blocks.ctypes.data)
    return [first + n * blocks.shape[1] for n in range(len(blocks))]


def _fastest(action: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest of some rounds."""
    clock, times = SystemClock(), []
    for _ in range(rounds):
        start = clock.monotonic()
        action()
        times.append(clock.monotonic() - start)
    return max(min(times), 1e-9)
