"""Opens the codecs that exist for a block format in host memory."""

import contextlib

from baton.core.kv_codec import KvCodecName
from baton.errors import Unavailable
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.build import supported_instruction_sets
from baton.kv_codec.header import has_codecs
from baton.kv_codec.native_codec import open_native_codecs
from baton.kv_codec.portable_fp8 import PortableFp8Codec
from baton.kv_codec.portable_lossless import PortableLosslessCodec
from baton.kv_codec.portable_rotated import PortableRotatedCodec
from baton.kv_codec.rotated_layout import BITS, rotated_layout


def open_codecs(block_format: BlockFormat | None) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs for blocks of ``block_format`` in host memory, by name. It is empty if
    there is no format, or none that can be encoded. They compute by compiled kernels, or in NumPy
    if these can't be used here. Those for GPUs are in :mod:`baton.engine.cuda.kv_codec`.

    There is no INT4 or INT2 if ``kv_heads * head_dim`` is not a multiple of 64."""
    if block_format is None or not has_codecs(block_format):
        return {}
    for instruction_set in supported_instruction_sets()[:1]:
        with contextlib.suppress(Unavailable):  # there is no compiler
            return open_native_codecs(block_format, instruction_set)
    return open_portable_codecs(block_format)


def open_portable_codecs(block_format: BlockFormat) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs in NumPy for a format that has codecs."""
    codecs: dict[KvCodecName, BlockCodec] = {
        KvCodecName.LOSSLESS: PortableLosslessCodec(block_format),
        KvCodecName.FP8: PortableFp8Codec(block_format),
    }
    for name in BITS:
        if (layout := rotated_layout(name, block_format)) is not None:
            codecs[name] = PortableRotatedCodec(name, block_format, layout)
    return codecs
