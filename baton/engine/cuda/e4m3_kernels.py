"""Triton functions, for other kernels to call, that convert to FP8 (E4M3) and back."""

import triton
import triton.language as tl


@triton.jit
def to_pool_dtype(x, factor, FP8: tl.constexpr):
    """Return ``x`` in the pool's dtype: unchanged, or, if the pool is in FP8, ``x`` * ``factor`` in
    E4M3."""
    if FP8:
        x = to_e4m3(x.to(tl.float32) * factor)
    return x


@triton.jit
def to_e4m3(x):
    """Round FP32 to the nearest E4M3 number, ties to even. Numbers that are too large are
    clamped."""
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Convert E4M3 to a wider format, exactly. Triton's own conversion to BF16 takes an F2F
    instruction for each number, which only a few lanes of a multiprocessor execute. Conversions to
    FP16, to FP32 and from there to BF16 have faster instructions."""
    half = codes.to(tl.float16)
    return half if dtype == tl.float16 else half.to(tl.float32).to(dtype)


@triton.jit
def from_pool_dtype(x, dtype: tl.constexpr):
    """Return keys or values of the pool in ``dtype``: converted if the pool is in FP8."""
    return from_e4m3(x, dtype) if x.dtype == tl.float8e4nv else x.to(dtype)
