"""The codecs INT4 and INT2 in NumPy; see :mod:`baton.kv_codec.rotated_layout`.

Each addition and rounding is in the same order as in the kernels, so that the bytes are the same.
"""

import numpy as np
import numpy.typing as npt

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import HEADER_BYTES
from baton.kv_codec.host_memory import Bytes
from baton.kv_codec.portable_codec import PortableCodec
from baton.kv_codec.portable_values import (
    Floats,
    from_bfloat16,
    read_values,
    to_bfloat16,
    write_values,
)
from baton.kv_codec.rotated_layout import (
    LARGE_GROUP,
    MAGNITUDES,
    MAX_SCALE,
    MAX_VALUE,
    MEAN_BITS,
    MIN_SCALE,
    SIGN_WORDS,
    RotatedLayout,
)

Words = npt.NDArray[np.uint16]

_NEGATED = np.array([SIGN_WORDS[i // 32] >> (i % 32) & 1 for i in range(LARGE_GROUP)])
_SIGNS = (1 - 2 * _NEGATED).astype(np.float32)
_MAX_SCALE_BITS = int(to_bfloat16(np.array([MAX_SCALE], np.float32))[0])


class PortableRotatedCodec(PortableCodec):
    def __init__(self, name: KvCodecName, block_format: BlockFormat, layout: RotatedLayout) -> None:
        self._layout = layout
        super().__init__(name, block_format, layout.encoded_bytes, layout.encoded_bytes)

    def _encode(self, block: Bytes, target: Bytes) -> int:
        layout = self._layout
        values = read_values(block, self._format)
        values = np.where(np.isnan(values), np.float32(0), values)
        limit = np.float32(MAX_VALUE)
        rows = values.clip(-limit, limit).reshape(layout.num_planes, layout.block_tokens, -1)
        mean_scales, mean_codes = encode_groups(self._groups(_means(rows)), MEAN_BITS)
        means = decode_groups(mean_scales, mean_codes, MEAN_BITS, layout.group)
        differences = rows - means.reshape(layout.num_planes, 1, layout.row)
        scales, codes = encode_groups(self._groups(differences), layout.bits)
        target[:HEADER_BYTES] = self._header
        target[layout.scales : layout.codes] = 0
        all_scales = np.concatenate((mean_scales, scales), axis=1).astype("<u2")
        end = layout.scales + 2 * layout.num_scales
        target[layout.scales : end] = all_scales.ravel().view(np.uint8)
        planes = (layout.num_planes, -1)
        target[layout.codes :] = np.concatenate(
            (mean_codes.reshape(planes), codes.reshape(planes)), axis=1
        ).ravel()
        return layout.encoded_bytes

    def _decode(self, source: Bytes, block: Bytes) -> bool:
        layout = self._layout
        end = layout.scales + 2 * layout.num_scales
        scales = source[layout.scales : end].view("<u2").astype(np.uint16)
        if (
            not np.array_equal(source[:HEADER_BYTES], self._header)
            or scales.max() > _MAX_SCALE_BITS
        ):
            return False
        scales = scales.reshape(layout.num_planes, 1 + layout.block_tokens, layout.num_groups)
        codes = source[layout.codes :].reshape(layout.num_planes, -1)
        mean_codes, row_codes = np.split(codes, [layout.mean_bytes], axis=1)
        means = decode_groups(
            scales[:, :1], self._code_groups(mean_codes, 1), MEAN_BITS, layout.group
        )
        differences = decode_groups(
            scales[:, 1:],
            self._code_groups(row_codes, layout.block_tokens),
            layout.bits,
            layout.group,
        )
        write_values(differences + means, block, self._format)
        return True

    def _groups(self, rows: Floats) -> Floats:
        """Cut rows [num_planes, rows, row] into groups [num_planes, rows, num_groups, group]."""
        return rows.reshape(*rows.shape[:2], self._layout.num_groups, self._layout.group)

    def _code_groups(self, codes: Bytes, rows: int) -> Bytes:
        return codes.reshape(self._layout.num_planes, rows, self._layout.num_groups, -1)


def encode_groups(groups: Floats, bits: int) -> tuple[Words, Bytes]:
    """Return the scales [...] of ``groups`` [..., group], in BF16, and the codes
    [..., group * bits / 8]."""
    scales = to_bfloat16(np.sqrt(_sums_of_squares(groups)))
    scales[from_bfloat16(scales) < MIN_SCALE] = 0
    factors = np.zeros(scales.shape, np.float32)
    np.divide(np.float32(1), from_bfloat16(scales), out=factors, where=scales > 0)
    rotated = hadamard(groups * _SIGNS[: groups.shape[-1]]) * factors[..., None]
    sizes = np.abs(rotated)
    codes = (rotated.view(np.uint32) >> 31 << (bits - 1)).astype(np.uint8)
    for threshold in _thresholds(bits):
        codes += sizes > threshold
    return scales, _pack(codes, bits)


def decode_groups(scales: Words, packed: Bytes, bits: int, group: int) -> Floats:
    """Return the groups [..., group] for their scales and codes."""
    codes = _unpack(packed, bits)
    magnitudes = np.array(MAGNITUDES[bits], np.float32)
    rotated = np.concatenate((magnitudes, -magnitudes))[codes]
    factors = from_bfloat16(scales) * np.float32(1 / group)
    return hadamard(rotated) * factors[..., None] * _SIGNS[:group]


def hadamard(values: Floats) -> Floats:
    """Return the Hadamard transform of the last dimension, not normalised."""
    shape, stride = values.shape, values.shape[-1] // 2
    while stride:
        pairs = values.reshape(*shape[:-1], -1, 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack((first + second, first - second), axis=-2).reshape(shape)
        stride //= 2
    return values


def _sums_of_squares(groups: Floats) -> Floats:
    """Return the sums [...] of the squares of ``groups`` [..., group]: fold halves upon each
    other."""
    squares = groups * groups
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0]


def _means(rows: Floats) -> Floats:
    """Return the means [num_planes, 1, row] of the tokens, which are added in order."""
    total = rows[:, 0].copy()
    for token in range(1, rows.shape[1]):
        total += rows[:, token]
    return (total * np.float32(1 / rows.shape[1]))[:, None]


def _thresholds(bits: int) -> Floats:
    magnitudes = np.array(MAGNITUDES[bits], np.float32)
    return (magnitudes[1:] + magnitudes[:-1]) * np.float32(0.5)


def _pack(codes: Bytes, bits: int) -> Bytes:
    parts = codes.reshape(*codes.shape[:-1], 8 // bits, -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(parts << shifts, axis=-2)
    return packed


def _unpack(packed: Bytes, bits: int) -> Bytes:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts: Bytes = packed[..., None, :] >> shifts & (2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)
