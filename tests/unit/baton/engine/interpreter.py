"""Replaces functions of the interpreter in Triton 3.7 to 3.9, so that it computes as GPUs do.

Triton's own functions multiply the bit patterns of BF16, truncate where GPUs round to BF16, lose
carries when they round to FP8, and compute products with a library whose sums depend on a row's
position. The replacements round to nearest, ties to even; values too large for FP8 become its
largest value. They sum products in FP64, so that a row's products have the same bits at any
position. For products of FP8 by FP8, which torch supports on GPUs only, they decode the values
before they multiply them.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from baton.engine.quantization import E4M3, to_e4m3

TORCH_TYPES = {
    tl.float8e4nv: E4M3,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
BIT_PATTERN_TYPES = {tl.float8e4nv: torch.uint8, tl.bfloat16: torch.uint16}
"""The integer types in which the interpreter stores formats that numpy does not support."""


def to_torch(values: Any, kind: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values)).view(TORCH_TYPES[kind])


def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    found = to_torch(values, source)
    made = to_e4m3(found.float()) if target == tl.float8e4nv else found.to(TORCH_TYPES[target])
    return made.view(BIT_PATTERN_TYPES.get(target, made.dtype)).numpy()


def dot(self: Any, one: Any, other: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
    products = [to_torch(part.data, part.dtype.scalar).double() for part in (one, other)]
    found = torch.matmul(*products).to(TORCH_TYPES[acc.dtype.scalar]).numpy()
    return interpreter.TensorHandle(found + acc.data, acc.dtype.scalar)


def scaled_mm(
    one: torch.Tensor,
    other: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Compute what ``torch._scaled_mm`` computes on a GPU from ``one`` [rows, depth] and ``other``
    [depth, outs], and assert the conditions that it requires there."""
    (rows, depth), outs = one.shape, other.shape[1]
    assert one.dtype is E4M3 and other.dtype is E4M3
    assert one.is_contiguous() and other.t().is_contiguous() and not use_fast_accum
    assert depth % 16 == outs % 16 == 0 and out_dtype is torch.bfloat16
    assert scale_a.shape == (rows, 1) and scale_b.shape == (1, outs)
    assert all(s.is_contiguous() and s.dtype is torch.float32 for s in (scale_a, scale_b))
    product = (one.float() @ other.float()) * scale_a * scale_b
    return (product if bias is None else product + bias.float()).to(out_dtype)


def patch_language_once() -> None:
    """Replace the functions of Triton's language by interpreted ones for the rest of the process.
    Triton itself would do so at each launch, and at each call from one kernel function to another,
    and that takes more time than the kernels."""
    kernel = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patches = interpreter._patch_lang(kernel)
    nothing_to_restore = type(patches)()
    interpreter._patch_lang = lambda _kernel: nothing_to_restore


def compute_as_gpus_do() -> None:
    patch_language_once()
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
