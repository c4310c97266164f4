"""Measures the KV codecs of a worker at its start; the conductor chooses between them."""

from collections.abc import Callable, Mapping

import torch

from baton.core.kv_codec import CodecSpeed, KvCodecName, KvCodecs
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.worker.limits import MAX_SAMPLE_BLOCKS

SAMPLE_BYTES = {"cpu": 2**20, "cuda": 64 * 2**20}
"""Size of the KV that is encoded, by kind of device: it takes a CPU some milliseconds, and is
enough work for all of a GPU."""

NUM_ROUNDS = 2
"""Number of measurements, of which the fastest counts, after one to warm up."""


def conductor_codecs(codecs: KvCodecs) -> frozenset[KvCodecName]:
    """Return the codecs whose speeds the conductor needs: that of the store, and those among which
    it chooses for a transfer."""
    wanted = {codecs.wire, codecs.store}
    if codecs.wire is not KvCodecName.NONE:
        wanted.add(KvCodecName.LOSSLESS)
    return frozenset(wanted - {KvCodecName.NONE})


def measure_codec_speeds(
    codecs: Mapping[KvCodecName, BlockCodec],
    block_format: BlockFormat | None,
    device: str,
    wanted: frozenset[KvCodecName],
    now: Callable[[], float],
) -> tuple[CodecSpeed, ...]:
    """Return the speeds of those of ``codecs`` that are ``wanted``, for normally distributed KV of
    ``block_format`` in the memory of ``device``. Codecs that make no block of it smaller are left
    out. ``now`` returns the time in seconds. Takes some milliseconds per codec."""
    found = [codecs[name] for name in KvCodecName if name in wanted and name in codecs]
    if block_format is None or not found:
        return ()
    blocks = _sample(block_format, device)
    measured = (_measure(codec, blocks, now) for codec in found)
    return tuple(speed for speed in measured if speed is not None)


def _sample(block_format: BlockFormat, device: str) -> torch.Tensor:
    """Return blocks of random values, [num_blocks, values of a block]."""
    sample_bytes = SAMPLE_BYTES["cpu" if device == "cpu" else "cuda"]
    num_blocks = min(max(sample_bytes // block_format.size_bytes, 1), MAX_SAMPLE_BLOCKS)
    generator = torch.Generator(device).manual_seed(0)
    num_values = block_format.num_planes * block_format.plane_values
    values = torch.randn((num_blocks, num_values), generator=generator, device=device)
    blocks = values.to(getattr(torch, block_format.dtype))
    if blocks.device.type == "cuda":
        torch.cuda.synchronize(blocks.device)  # codecs have a stream of their own
    return blocks


def _measure(
    codec: BlockCodec, blocks: torch.Tensor, now: Callable[[], float]
) -> CodecSpeed | None:
    block_bytes, num_blocks = blocks[0].nbytes, len(blocks)
    encoded = torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device=blocks.device)
    decoded = torch.empty_like(blocks)
    sources, targets = _addresses(blocks), _addresses(encoded)
    sizes = codec.encode(sources, targets)
    smaller = [number for number, size in enumerate(sizes) if size]
    if not smaller:
        return None
    readable, outputs = [targets[n] for n in smaller], _addresses(decoded)[: len(smaller)]
    lengths = [sizes[number] for number in smaller]
    encode_seconds = _fastest(lambda: codec.encode(sources, targets), now)
    codec.decode(readable, lengths, outputs)
    decode_seconds = _fastest(lambda: codec.decode(readable, lengths, outputs), now)
    num_raw = num_blocks - len(smaller)
    return CodecSpeed(
        codec.name,
        (sum(lengths) + num_raw * block_bytes) / blocks.nbytes,
        blocks.nbytes / encode_seconds,
        len(smaller) * block_bytes / decode_seconds,
    )


def _addresses(rows: torch.Tensor) -> list[int]:
    return [rows.data_ptr() + number * rows[0].nbytes for number in range(len(rows))]


def _fastest(work: Callable[[], object], now: Callable[[], float]) -> float:
    """Return the seconds that ``work`` takes in the fastest of NUM_ROUNDS rounds."""
    seconds = []
    for _ in range(NUM_ROUNDS):
        began = now()
        work()
        seconds.append(max(now() - began, 1e-6))
    return min(seconds)
