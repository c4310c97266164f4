"""The compiled kernels behind ctypes: every function with its types, and what it wants.

The GIL is free while one runs. Nothing here checks what an address points to: that is done by
:mod:`baton.engine.native.decoder` and :mod:`baton.engine.native.matrix`, which alone call it.
"""

import ctypes
import functools
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int64, c_void_p

import numpy as np
import torch

from baton.engine.native import build
from baton.engine.native.processor import best_instruction_set

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The formats that the kernels compute in, and their numbers there."""

SOURCE_DTYPE_CODES = {**DTYPE_CODES, torch.float16: 2}
"""What weights may come in."""

QUANTIZATION_CODES = {"none": 0, "int8": 1, "int4": 2}
"""How weights are kept (kernels/codes.h), by :mod:`baton.engine.quantization`'s names."""

LAYER_FIELDS = (
    "input_norm", "post_norm", "qkv", "qkv_bias", "output", "q_norm", "k_norm", "gate_up", "down",
)  # fmt: skip


class DecoderShape(Structure):
    """Of a decoder and its pool; all sizes are elements."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate",
                "vocabulary", "positions", "num_blocks", "block_tokens",
            )
        ],
        ("epsilon", c_double),
    ]  # fmt: skip


class LayerPointers(Structure):
    """Addresses of a layer's weights, 0 for what it has not, and how its matrices are kept."""

    _fields_ = [*[(name, c_void_p) for name in LAYER_FIELDS], ("coding", c_int64)]


SAMPLING_ROW_DTYPE = np.dtype(
    [
        *[
            (name, np.float64)
            for name in (
                "temperature", "top_p", "min_p", "repetition", "presence", "frequency",
            )
        ],
        ("seed", np.uint64),
        *[
            (name, np.int64)
            for name in ("position", "top_k", "seen", "answer", "end", "bias", "bias_end")
        ],
    ]
)  # fmt: skip
"""What a row asks for when its token is chosen, as kernels/sampler.h has it."""


class PackedRows(Structure):
    """The packed rows of a step, as kernels/pages.h has them: int64 arrays and their sizes."""

    _fields_ = [
        ("num_rows", c_int64),
        ("starts", c_void_p),
        ("offsets", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
    ]


_FUNCTIONS = {
    "shape_bytes": (c_int64, []),
    "layer_bytes": (c_int64, []),
    "batch_bytes": (c_int64, []),
    "dials_bytes": (c_int64, []),
    "team": (c_void_p, [c_int64]),
    "team_free": (None, [c_void_p]),
    # kind, coding, outs, ins, gated
    "packed_bytes": (c_int64, [c_int64, c_int64, c_int64, c_int64, c_bool]),
    # team, kind, addresses of parts, rows of parts, their kind, coding, outs, ins, gated, to
    "pack": (
        c_char_p,
        [c_void_p, c_int64, POINTER(c_void_p), POINTER(c_int64), *[c_int64] * 4, c_bool, c_void_p],
    ),
    # team, kind, x, rows of x, packed, coding, outs, ins, gated, to
    "multiply": (
        c_char_p,
        [c_void_p, c_int64, c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_bool, c_void_p],
    ),
    "exponential": (None, [c_void_p, c_int64, c_void_p]),
    # kind, steps of 24 products of 16 lanes each
    "products_only": (c_float, [c_int64, c_int64]),
    # from (at a multiple of 64), bytes
    "reads_only": (c_int64, [c_void_p, c_int64]),
    # team, kind, shape, pool, cosines, sines
    "decoder": (c_void_p, [c_void_p, c_int64, POINTER(DecoderShape), c_void_p, c_void_p, c_void_p]),
    "decoder_free": (None, [c_void_p]),
    "set_layer": (None, [c_void_p, c_int64, POINTER(LayerPointers)]),
    # decoder, norm, packed head, its coding
    "set_head": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    # decoder, tokens, how many, x
    "embed": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p]),
    # decoder, rows, first layer, last layer, x, normed
    "run": (c_char_p, [c_void_p, POINTER(PackedRows), c_int64, c_int64, c_void_p, c_void_p]),
    # decoder, rows, layer, qkv, to
    "attend": (c_char_p, [c_void_p, POINTER(PackedRows), c_int64, c_void_p, c_void_p]),
    # decoder, x, rows of x, to
    "logits": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p]),
    # team, vocabulary
    "samplers": (c_void_p, [c_void_p, c_int64]),
    "samplers_free": (None, [c_void_p]),
    # samplers, logits, rows, dials, history, tokens of biases, biases, to
    "choose": (c_char_p, [c_void_p, c_void_p, c_int64, *[c_void_p] * 5]),
}


def load() -> ctypes.CDLL:
    """For this machine's processor."""
    wanted = best_instruction_set()
    assert wanted is not None, "whether there are kernels is asked before"
    return load_for(wanted)


@functools.cache
def load_for(wanted: str) -> ctypes.CDLL:
    """Compiled first if need be. Raises Unavailable that says why it can't be."""
    library = ctypes.CDLL(str(build.build_library(wanted)))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"baton_{name}")
        function.restype, function.argtypes = result, arguments
    sizes = [library.baton_shape_bytes(), library.baton_layer_bytes(), library.baton_batch_bytes()]
    assert sizes == [ctypes.sizeof(kind) for kind in (DecoderShape, LayerPointers, PackedRows)]
    assert library.baton_dials_bytes() == SAMPLING_ROW_DTYPE.itemsize
    return library


def call_checked(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    """A function that returns what is wrong. Only a bug of ours can make it say something."""
    told = function(*arguments)
    assert told is None, told.decode()
