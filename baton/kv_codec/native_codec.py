"""The codecs by compiled kernels, for blocks in host memory."""

import ctypes
from collections.abc import Sequence

from baton.core.kv_codec import KvCodecName
from baton.kv_codec import fp8_layout, rotated_layout
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import HEADER_BYTES, make_header
from baton.kv_codec.lossless_layout import lossless_layout
from baton.kv_codec.native_library import (
    Fp8Fields,
    KernelPair,
    LosslessFields,
    RotatedFields,
    load_for,
)


class NativeCodec:
    """A :class:`~baton.kv_codec.base.BlockCodec` by compiled kernels."""

    def __init__(self, name: KvCodecName, max_encoded_bytes: int, kernels: KernelPair) -> None:
        self.name = name
        self.max_encoded_bytes = max_encoded_bytes
        self._kernels = kernels

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        assert len(blocks) == len(targets)
        return self._kernels.encode(blocks, targets)

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        assert len(sources) == len(sizes_bytes) == len(blocks)
        return self._kernels.decode(sources, sizes_bytes, blocks)


def open_native_codecs(
    block_format: BlockFormat, instruction_set: str
) -> dict[KvCodecName, BlockCodec]:
    """Return the codecs for a format that has codecs, by the kernels for an instruction set. Raises
    Unavailable if these can't be compiled."""
    library = load_for(instruction_set)
    size = block_format.size_bytes
    fp8 = _fp8_fields(block_format)
    codecs: dict[KvCodecName, BlockCodec] = {
        KvCodecName.LOSSLESS: NativeCodec(
            KvCodecName.LOSSLESS,
            size,
            KernelPair(library, "lossless", _lossless_fields(block_format)),
        ),
        KvCodecName.FP8: NativeCodec(
            KvCodecName.FP8, fp8.encoded_bytes, KernelPair(library, "fp8", fp8)
        ),
    }
    for name in rotated_layout.BITS:
        if (fields := _rotated_fields(name, block_format)) is not None:
            kernels = KernelPair(library, "rotated", fields)
            codecs[name] = NativeCodec(name, fields.encoded_bytes, kernels)
    return codecs


def _lossless_fields(block_format: BlockFormat) -> LosslessFields:
    layout = lossless_layout(block_format)
    return LosslessFields(
        num_planes=layout.num_planes,
        num_chunks=layout.num_chunks,
        is_float32=_is_float32(block_format),
        sample_stride=layout.sample_stride,
        max_escapes=layout.max_escapes,
        ends=layout.ends,
        firsts=layout.firsts,
        codes=layout.codes,
        rests=layout.rests,
        low_halves=layout.low_halves,
        escapes=layout.escapes,
        size_bytes=layout.size_bytes,
        header=_header(KvCodecName.LOSSLESS, block_format),
    )


def _fp8_fields(block_format: BlockFormat) -> Fp8Fields:
    layout = fp8_layout.fp8_layout(block_format)
    return Fp8Fields(
        is_float32=_is_float32(block_format),
        num_planes=layout.num_planes,
        block_tokens=layout.block_tokens,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        min_scale=fp8_layout.MIN_SCALE,
        max_scale=fp8_layout.MAX_SCALE,
        scales=layout.scales,
        codes=layout.codes,
        encoded_bytes=layout.encoded_bytes,
        header=_header(KvCodecName.FP8, block_format),
    )


def _rotated_fields(name: KvCodecName, block_format: BlockFormat) -> RotatedFields | None:
    layout = rotated_layout.rotated_layout(name, block_format)
    if layout is None:
        return None
    magnitudes = rotated_layout.MAGNITUDES
    return RotatedFields(
        bits=layout.bits,
        is_float32=_is_float32(block_format),
        num_planes=layout.num_planes,
        block_tokens=layout.block_tokens,
        row=layout.row,
        group=layout.group,
        scales=layout.scales,
        codes=layout.codes,
        encoded_bytes=layout.encoded_bytes,
        min_scale=rotated_layout.MIN_SCALE,
        max_scale=rotated_layout.MAX_SCALE,
        max_value=rotated_layout.MAX_VALUE,
        mean_factor=1 / layout.block_tokens,
        sign_words=(ctypes.c_uint32 * 4)(*rotated_layout.SIGN_WORDS),
        magnitudes4=(ctypes.c_float * 8)(*magnitudes[4]),
        magnitudes2=(ctypes.c_float * 8)(*magnitudes[2]),
        header=_header(name, block_format),
    )


def _is_float32(block_format: BlockFormat) -> int:
    return int(block_format.dtype == "float32")


def _header(name: KvCodecName, block_format: BlockFormat) -> "ctypes.Array[ctypes.c_uint8]":
    return (ctypes.c_uint8 * HEADER_BYTES)(*make_header(name, block_format))
