"""The lossless codec in NumPy, for processors that have no kernels."""

import numpy as np
import numpy.typing as npt

from baton.core.kv_codec import KvCodecName
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import CHUNK_VALUES, HEADER_BYTES
from baton.kv_codec.host_memory import Bytes
from baton.kv_codec.lossless_layout import CODE_BITS, MAX_FIRST, WINDOW, lossless_layout
from baton.kv_codec.portable_codec import PortableCodec

Words = npt.NDArray[np.uint16]

_BIT_WEIGHTS = np.arange(CODE_BITS, dtype=np.uint8)[:, None]


class PortableLosslessCodec(PortableCodec):
    """The codec of :mod:`baton.kv_codec.lossless_layout`."""

    def __init__(self, block_format: BlockFormat) -> None:
        self._layout = lossless_layout(block_format)
        size = block_format.size_bytes
        super().__init__(KvCodecName.LOSSLESS, block_format, self._layout.escapes, size)

    def _encode(self, block: Bytes, target: Bytes) -> int:
        layout = self._layout
        rotated, low_halves = self._split(block)
        exponents = (rotated >> 8).astype(np.uint8)
        firsts = window_firsts(exponents[:, :: layout.sample_stride])
        codes = np.minimum(exponents - firsts[:, None, None], WINDOW)
        is_escape = codes == WINDOW
        ends = is_escape.sum(axis=(1, 2)).cumsum()
        if ends[-1] > layout.max_escapes:
            return 0
        bits = (codes[:, :, None, :] >> _BIT_WEIGHTS) & 1
        target[:HEADER_BYTES] = self._header
        target[layout.ends : layout.firsts] = ends.astype("<u4").view(np.uint8)
        target[layout.firsts : layout.codes] = 0
        target[layout.firsts : layout.firsts + layout.num_planes] = firsts
        target[layout.codes : layout.rests] = np.packbits(bits, axis=-1, bitorder="little").ravel()
        target[layout.rests : layout.low_halves] = rotated.astype(np.uint8).ravel()
        target[layout.low_halves : layout.escapes] = low_halves
        size = layout.escapes + int(ends[-1])
        target[layout.escapes : size] = exponents[is_escape]
        return size

    def _decode(self, source: Bytes, block: Bytes) -> bool:
        layout = self._layout
        ends = source[layout.ends : layout.firsts].view("<u4").astype(np.int64)
        firsts = source[layout.firsts : layout.firsts + layout.num_planes]
        if not np.array_equal(source[:HEADER_BYTES], self._header) or firsts.max() > MAX_FIRST:
            return False
        bits = source[layout.codes : layout.rests].reshape(
            layout.num_planes, layout.num_chunks, CODE_BITS, -1
        )
        unpacked = np.unpackbits(bits, axis=-1, bitorder="little")
        codes = (unpacked << _BIT_WEIGHTS).sum(axis=2, dtype=np.uint8)
        is_escape = codes == WINDOW
        counted = is_escape.sum(axis=(1, 2)).cumsum()
        if not np.array_equal(counted, ends) or layout.escapes + counted[-1] != len(source):
            return False
        exponents = codes + firsts[:, None, None]
        exponents[is_escape] = source[layout.escapes :]
        rests = source[layout.rests : layout.low_halves].reshape(exponents.shape)
        rotated = (exponents.astype(np.uint16) << 8) | rests
        self._join(rotated, source[layout.low_halves : layout.escapes], block)
        return True

    def _split(self, block: Bytes) -> tuple[Words, Bytes]:
        """Return the upper 16 bits of each value, rotated to the left so that the exponent is in
        the high byte, [num_planes, num_chunks, CHUNK_VALUES], and the bytes of the lower 16."""
        if self._format.dtype == "float32":
            halves = block.view("<u2").reshape(-1, 2)
            upper, low_halves = halves[:, 1], halves[:, 0].copy().view(np.uint8)
        else:
            upper, low_halves = block.view("<u2"), block[:0]
        rotated = ((upper << 1) | (upper >> 15)).astype(np.uint16)
        return rotated.reshape(self._layout.num_planes, -1, CHUNK_VALUES), low_halves

    def _join(self, rotated: Words, low_halves: Bytes, block: Bytes) -> None:
        upper = ((rotated >> 1) | (rotated << 15)).ravel()
        if self._format.dtype == "float32":
            halves = block.view("<u2").reshape(-1, 2)
            halves[:, 1], halves[:, 0] = upper, low_halves.copy().view("<u2")
        else:
            block.view("<u2")[:] = upper


def window_firsts(sample: Bytes) -> Bytes:
    """Return the first exponents [num_planes] of the windows that contain most of the exponents
    ``sample`` [num_planes, chunks, CHUNK_VALUES], the lowest if several contain as many."""
    planes = len(sample)
    places = sample.reshape(planes, -1).astype(np.int64) + 256 * np.arange(planes)[:, None]
    counts = np.bincount(places.ravel(), minlength=256 * planes).reshape(planes, 256)
    sums = np.pad(counts.cumsum(axis=1), ((0, 0), (1, 0)))
    firsts: Bytes = (sums[:, WINDOW:] - sums[:, :-WINDOW]).argmax(axis=1).astype(np.uint8)
    return firsts
