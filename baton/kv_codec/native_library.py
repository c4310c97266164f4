"""The ctypes interface of the codecs' compiled kernels.

The GIL is released during a call. Nothing here checks what an address points to.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_uint8, c_uint32, c_void_p

from baton.kv_codec import build
from baton.kv_codec.header import HEADER_BYTES


class LosslessFields(Structure):
    """The same layout as ``LosslessLayout`` in kernels/lossless.h."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "num_planes", "num_chunks", "is_float32", "sample_stride", "max_escapes", "ends",
                "firsts", "codes", "rests", "low_halves", "escapes", "size_bytes",
            )
        ],
        ("header", c_uint8 * HEADER_BYTES),
    ]  # fmt: skip


class Fp8Fields(Structure):
    """The same layout as ``Fp8Layout`` in kernels/fp8.h."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "is_float32", "num_planes", "block_tokens", "kv_heads", "head_dim", "min_scale",
                "max_scale", "scales", "codes", "encoded_bytes",
            )
        ],
        ("header", c_uint8 * HEADER_BYTES),
    ]  # fmt: skip


class RotatedFields(Structure):
    """The same layout as ``RotatedLayout`` in kernels/rotated.h."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "bits", "is_float32", "num_planes", "block_tokens", "row", "group", "scales",
                "codes", "encoded_bytes",
            )
        ],
        *[(name, c_float) for name in ("min_scale", "max_scale", "max_value", "mean_factor")],
        ("sign_words", c_uint32 * 4),
        ("magnitudes4", c_float * 8),
        ("magnitudes2", c_float * 8),
        ("header", c_uint8 * HEADER_BYTES),
    ]  # fmt: skip


_ENCODE = [c_void_p, c_int64, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_int64)]
"""Layout, number of blocks, their addresses, those of their encodings, and where sizes go."""

_DECODE = [
    c_void_p, c_int64, POINTER(c_void_p), POINTER(c_int64), POINTER(c_void_p), POINTER(c_uint8),
]  # fmt: skip
"""Layout, number of blocks, addresses and sizes of encodings, addresses of blocks, and where it is
written whether each was valid."""

_FIELDS = {"lossless": LosslessFields, "fp8": Fp8Fields, "rotated": RotatedFields}


class KernelPair:
    """The two functions for one kind of codec and one layout; ``fields`` is one of the structures
    above."""

    def __init__(self, library: ctypes.CDLL, kind: str, fields: Structure) -> None:
        self._encode = getattr(library, f"baton_encode_{kind}")
        self._decode = getattr(library, f"baton_decode_{kind}")
        self._fields = fields

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        """See :class:`~baton.kv_codec.base.BlockCodec`. Raises MemoryError."""
        sizes = (c_int64 * len(blocks))()
        layout = ctypes.addressof(self._fields)
        _check(self._encode(layout, len(blocks), _array(blocks), _array(targets), sizes))
        return list(sizes)

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        """See :class:`~baton.kv_codec.base.BlockCodec`. Raises MemoryError."""
        count, valid = len(sources), (c_uint8 * len(sources))()
        sizes, layout = (c_int64 * count)(*sizes_bytes), ctypes.addressof(self._fields)
        _check(self._decode(layout, count, _array(sources), sizes, _array(blocks), valid))
        return [bool(each) for each in valid]


@functools.cache
def load_for(wanted: str) -> ctypes.CDLL:
    """Load the library for an instruction set in :mod:`baton.kv_codec.build`; compile it if needed.
    Raises Unavailable with the reason if it can't be compiled."""
    library = ctypes.CDLL(str(build.build_library(wanted)))
    for kind, fields in _FIELDS.items():
        for function, arguments in (("encode", _ENCODE), ("decode", _DECODE)):
            found = getattr(library, f"baton_{function}_{kind}")
            found.restype, found.argtypes = c_int64, arguments
        size = getattr(library, f"baton_{kind}_layout_bytes")
        size.restype, size.argtypes = c_int64, []
        assert size() == ctypes.sizeof(fields)
    return library


def _array(addresses: Sequence[int]) -> "ctypes.Array[c_void_p]":
    return (c_void_p * len(addresses))(*addresses)


def _check(status: int) -> None:
    if status:
        raise MemoryError("there is no memory for a codec's buffer")
