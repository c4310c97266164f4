"""Opens the codecs that exist for a block format on a GPU."""

import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.kv_codec.fp8 import GpuFp8Codec
from baton.engine.cuda.kv_codec.lossless import GpuLosslessCodec
from baton.engine.cuda.kv_codec.rotated import GpuRotatedCodec
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import has_codecs
from baton.kv_codec.rotated_layout import BITS, rotated_layout

MAX_BLOCK_BYTES = 2**31 - 1
"""Offsets in a block are integers of 32 bits in the kernels."""


def open_gpu_codecs(
    block_format: BlockFormat, device: torch.device
) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs for blocks of ``block_format`` in the memory of ``device``, by name; the
    same as :func:`baton.kv_codec.registry.open_codecs` returns for host memory. It is empty for
    formats that have no codecs, and for blocks of more than MAX_BLOCK_BYTES."""
    if not has_codecs(block_format) or block_format.size_bytes > MAX_BLOCK_BYTES:
        return {}
    codecs: dict[KvCodecName, BlockCodec] = {
        KvCodecName.LOSSLESS: GpuLosslessCodec(block_format, device),
        KvCodecName.FP8: GpuFp8Codec(block_format, device),
    }
    for name in BITS:
        if (layout := rotated_layout(name, block_format)) is not None:
            codecs[name] = GpuRotatedCodec(name, block_format, layout, device)
    return codecs
