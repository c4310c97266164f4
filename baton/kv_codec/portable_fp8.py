"""The codec FP8 in NumPy; see :mod:`baton.kv_codec.fp8_layout`."""

import numpy as np
import numpy.typing as npt

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.fp8_layout import MAX_SCALE, MIN_SCALE, fp8_layout
from baton.kv_codec.header import HEADER_BYTES
from baton.kv_codec.host_memory import Bytes
from baton.kv_codec.portable_codec import PortableCodec
from baton.kv_codec.portable_values import Floats, read_values, write_values

_NAN, _LARGEST = 0x7F, 0x7E
_LEAST_NORMAL = np.float32(2.0**-6)
_SUBNORMAL_ROUNDER = np.float32(2.0**14)
"""Adding it to a value below _LEAST_NORMAL rounds the value to a multiple of 2**-9."""


class PortableFp8Codec(PortableCodec):
    def __init__(self, block_format: BlockFormat) -> None:
        self._layout = fp8_layout(block_format)
        size = self._layout.encoded_bytes
        super().__init__(KvCodecName.FP8, block_format, size, size)

    def _encode(self, block: Bytes, target: Bytes) -> int:
        layout = self._layout
        values = read_values(block, self._format)
        scales = head_scales(values)
        target[:HEADER_BYTES] = self._header
        target[layout.scales : layout.codes] = 0
        target[layout.scales : layout.scales + scales.size] = scales.ravel()
        factors = _power_of_two(254 - scales.astype(np.uint32))[:, None, :, None]
        target[layout.codes :] = to_e4m3(values, factors).ravel()
        return layout.encoded_bytes

    def _decode(self, source: Bytes, block: Bytes) -> bool:
        layout = self._layout
        scales = source[layout.scales : layout.scales + layout.num_planes * layout.kv_heads]
        if (
            not np.array_equal(source[:HEADER_BYTES], self._header)
            or scales.min() < MIN_SCALE
            or scales.max() > MAX_SCALE
        ):
            return False
        factors = _power_of_two(scales.reshape(layout.num_planes, 1, layout.kv_heads, 1))
        codes = source[layout.codes :].reshape(
            layout.num_planes, layout.block_tokens, layout.kv_heads, layout.head_dim
        )
        with np.errstate(over="ignore"):
            write_values(from_e4m3(codes) * factors, block, self._format)
        return True


def head_scales(values: Floats) -> Bytes:
    """Return the scales [num_planes, kv_heads] of ``values``
    [num_planes, block_tokens, kv_heads, head_dim]."""
    bits = values.view(np.uint32) & 0x7FFFFFFF
    largest = np.where(bits < 0x7F800000, bits, 0).max(axis=(1, 3))
    is_above = (largest & 0x7FFFFF) > 0x600000
    scales = (largest >> 23).astype(np.int64) - 8 + is_above
    clipped: Bytes = scales.clip(MIN_SCALE, MAX_SCALE).astype(np.uint8)
    return clipped


def to_e4m3(values: Floats, factors: Floats) -> Bytes:
    """Return the codes of ``values * factors``."""
    bits = values.view(np.uint32)
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.abs(values) * factors
        small = (sizes + _SUBNORMAL_ROUNDER).view(np.uint32) - _SUBNORMAL_ROUNDER.view(np.uint32)
        size_bits = sizes.view(np.uint32)
        rounded = (size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20
        codes = np.where(sizes < _LEAST_NORMAL, small, np.minimum(rounded - (120 << 3), _LARGEST))
    codes = np.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, codes)
    signed: Bytes = (codes | (bits >> 31) << 7).astype(np.uint8)
    return signed


def from_e4m3(codes: Bytes) -> Floats:
    """Return the numbers that E4M3 codes stand for."""
    sizes = (codes & 0x7F).astype(np.uint32)
    normal = ((sizes << 20) + (120 << 23)).view(np.float32)
    small = sizes.astype(np.float32) * np.float32(2.0**-9)
    values = np.where(sizes < 8, small, normal)
    bits = np.where(sizes == _NAN, np.uint32(0x7FC00000), values.view(np.uint32))
    bits |= (codes.astype(np.uint32) & 0x80) << 24
    numbers: Floats = bits.view(np.float32)
    return numbers


def _power_of_two(exponents: npt.NDArray[np.uint32] | Bytes) -> Floats:
    """Return 2 ** (exponent - 127) of each exponent."""
    bits = (exponents.astype(np.uint32) << 23).astype(np.uint32)
    powers: Floats = bits.view(np.float32)
    return powers
