"""The ctypes interface of the compiled kernels. It lists every function with its types and
parameters.

The GIL is released during a call. Nothing here checks what an address points to; the callers do
that, namely :mod:`baton.engine.native.decoder`, :mod:`baton.engine.native.matrix` and
:mod:`baton.engine.native.sampler`.
"""

import ctypes
import functools
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int64, c_void_p

import numpy as np
import torch

from baton.engine.native import build
from baton.engine.native.processor import best_instruction_set

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the kernels compute in, and the kernels' codes for them."""

SOURCE_DTYPE_CODES = {**DTYPE_CODES, torch.float16: 2}
"""The dtypes that weights may have in a checkpoint."""

INT4_SOURCE_CODE = 3
"""The kernels' code for weights that are :class:`baton.engine.quantization.Int4Codes` already."""

QUANTIZATION_CODES = {"none": 0, "int8": 1, "int4": 2}
"""The kernels' codes for the formats in which weights are stored (kernels/quantized.h), by the
formats' names in :mod:`baton.engine.quantization`."""

ACTIVATION_CODES = {"silu": 0, "gelu_pytorch_tanh": 1}
"""The kernels' codes for the activations in :mod:`baton.checkpoints.decoder_traits`."""

LAYER_FIELDS = (
    "input_norm", "post_norm", "qkv", "qkv_bias", "output", "q_norm", "k_norm", "gate_up", "down",
    "output_bias", "gate_up_bias", "down_bias", "sinks", "attention_output_norm",
    "feed_forward_output_norm",
)  # fmt: skip


class DecoderShape(Structure):
    """The shape of a decoder and its pool, and what its layers have in common; all sizes are in
    elements."""

    _fields_ = [
        *[
            (name, c_int64)
            for name in (
                "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate",
                "vocabulary", "positions", "num_blocks", "block_tokens", "layers_per_block",
                "num_groups",
            )
        ],
        *[(name, c_double) for name in ("epsilon", "score_scale", "norm_offset")],
        *[(name, c_int64) for name in ("norms_round_last", "activation")],
    ]  # fmt: skip


class LayerPointers(Structure):
    """The addresses of a layer's weights and of its cosines and sines, the format of its matrices,
    its window, and its place in the pool. What the layer does not have is 0."""

    _fields_ = [
        *[(name, c_void_p) for name in (*LAYER_FIELDS, "cos", "sin")],
        *[(name, c_int64) for name in ("coding", "window", "group", "place")],
    ]


class LowRankPointers(Structure):
    """The addresses of an adapter's packed matrices A [rank, ins] and B [outs, rank]; 0 if it has
    none."""

    _fields_ = [("a", c_void_p), ("b", c_void_p), ("rank", c_int64)]


class LoraLayerPointers(Structure):
    """An adapter's matrices for one layer; the same layout as ``LoraLayer`` in kernels/lora.h."""

    _fields_ = [(name, LowRankPointers) for name in ("qkv", "output", "gate_up", "down")]


class LoraSegmentPointers(Structure):
    """The tokens of a step that use an adapter, and the address of its layers; the same layout as
    ``LoraSegment`` in kernels/lora.h."""

    _fields_ = [("first", c_int64), ("count", c_int64), ("layers", c_void_p)]


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
            for name in (
                "position", "top_k", "history_start", "answer_start", "history_end",
                "bias_start", "bias_end",
            )
        ],
    ]
)  # fmt: skip
"""The layout of a row's sampling parameters, which is the same as that of ``SamplingRow`` in
kernels/sampler.h."""


class PackedRows(Structure):
    """The packed rows of a step: the addresses and sizes of int64 arrays. The structure has the
    same layout as ``Batch`` in kernels/paged_kv.h."""

    _fields_ = [
        ("num_rows", c_int64),
        ("starts", c_void_p),
        ("offsets", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("num_groups", c_int64),
        ("windows", c_void_p),
    ]


_FUNCTIONS = {
    "shape_bytes": (c_int64, []),
    "layer_bytes": (c_int64, []),
    "batch_bytes": (c_int64, []),
    "lora_layer_bytes": (c_int64, []),
    "lora_segment_bytes": (c_int64, []),
    "sampling_row_bytes": (c_int64, []),
    "thread_pool": (c_void_p, [c_int64]),
    # thread pool, number of threads
    "thread_pool_use": (None, [c_void_p, c_int64]),
    "thread_pool_free": (None, [c_void_p]),
    # kind, coding, outs, ins, gated
    "packed_bytes": (c_int64, [c_int64, c_int64, c_int64, c_int64, c_bool]),
    # thread pool, kind, addresses of parts, their rows, their kinds, coding, outs, ins, gated, to
    "pack": (
        c_char_p,
        [
            *[c_void_p, c_int64, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64)],
            *[*[c_int64] * 3, c_bool, c_void_p],
        ],
    ),
    # thread pool, kind, x, rows of x, packed, coding, outs, ins, gated, to
    "multiply": (
        c_char_p,
        [c_void_p, c_int64, c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_bool, c_void_p],
    ),
    # from, count, to
    "exponential": (None, [c_void_p, c_int64, c_void_p]),
    "power_of_two": (None, [c_void_p, c_int64, c_void_p]),
    # kind, steps of 24 products of 16 lanes each
    "peak_products": (c_float, [c_int64, c_int64]),
    # steps of four products of tiles of 16 x 16 x 32; returns 0 without tiles
    "peak_tile_products": (c_float, [c_int64]),
    # from (at a multiple of 64), bytes
    "peak_reads": (c_int64, [c_void_p, c_int64]),
    # thread pool, kind, shape, pool
    "decoder": (c_void_p, [c_void_p, c_int64, POINTER(DecoderShape), c_void_p]),
    "decoder_free": (None, [c_void_p]),
    "set_layer": (None, [c_void_p, c_int64, POINTER(LayerPointers)]),
    # decoder, norm, packed head, its coding
    "set_head": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    # decoder, tokens, how many, x
    "embed": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p]),
    # decoder, rows, segments of adapters, how many, first layer, last layer, x, normed
    "run": (
        c_char_p,
        [c_void_p, POINTER(PackedRows), c_void_p, *[c_int64] * 3, c_void_p, c_void_p],
    ),
    # decoder, rows, layer, qkv, to
    "attend": (c_char_p, [c_void_p, POINTER(PackedRows), c_int64, c_void_p, c_void_p]),
    # decoder, x, rows of x, to
    "logits": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p]),
    # thread pool, vocabulary
    "samplers": (c_void_p, [c_void_p, c_int64]),
    "samplers_free": (None, [c_void_p]),
    # samplers, logits, number of rows, rows, history, tokens of biases, biases, to
    "sample": (c_char_p, [c_void_p, c_void_p, c_int64, *[c_void_p] * 5]),
}


def load() -> ctypes.CDLL:
    """Load the library for this machine's processor. Call this only if the processor supports the
    kernels."""
    wanted = best_instruction_set()
    assert wanted is not None, "check unavailable_reason() first"
    return load_for(wanted)


@functools.cache
def load_for(wanted: str) -> ctypes.CDLL:
    """Load the library for the instruction set ``wanted``; compile it if needed. Raises Unavailable
    with the reason if it can't be compiled."""
    library = ctypes.CDLL(str(build.build_library(wanted)))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"baton_{name}")
        function.restype, function.argtypes = result, arguments
    sizes = [library.baton_shape_bytes(), library.baton_layer_bytes(), library.baton_batch_bytes()]
    assert sizes == [ctypes.sizeof(kind) for kind in (DecoderShape, LayerPointers, PackedRows)]
    assert library.baton_lora_layer_bytes() == ctypes.sizeof(LoraLayerPointers)
    assert library.baton_lora_segment_bytes() == ctypes.sizeof(LoraSegmentPointers)
    assert library.baton_sampling_row_bytes() == SAMPLING_ROW_DTYPE.itemsize
    return library


def call_checked(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    """Call a function of the library that returns an error message or null. Only a bug in our code
    can cause such an error."""
    error = function(*arguments)
    assert error is None, error.decode()
