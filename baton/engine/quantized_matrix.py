"""Quantized weights for torch. They are decoded for each product, unless a kernel reads the codes
directly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from baton.engine.quantization import E4M3, Int4Codes, QuantizedCodes, quantize, quantize_int4
from baton.engine.shards import StoredTensor


class QuantizedMatrix(torch.Tensor):
    """Quantized linear weights [outs, ins], or [num_experts, outs, ins], as a tensor subclass.

    It supports ``functional.linear`` and indexing (to select some of its rows, or one of its
    matrices). Any other operation raises AssertionError.
    """

    codes: QuantizedCodes | Int4Codes

    @staticmethod
    def quantize(weight: torch.Tensor, name: str) -> "QuantizedMatrix":
        """Quantize ``weight``. Products will be computed in its dtype. Raises Invalid if a weight
        is not finite."""
        rows = weight.reshape(-1, weight.shape[-1])
        codes = quantize_int4(rows) if name == "int4" else quantize(rows, name)
        return QuantizedMatrix.from_codes(codes, weight.shape, weight.dtype)

    @staticmethod
    def from_codes(
        codes: QuantizedCodes | Int4Codes, shape: Sequence[int], dtype: torch.dtype
    ) -> "QuantizedMatrix":
        """Wrap ``codes`` as a tensor of ``shape``; if that has three dimensions, the codes of all
        matrices are stacked along the rows. Products will be computed in ``dtype``."""
        matrix: QuantizedMatrix = torch.Tensor._make_wrapper_subclass(
            QuantizedMatrix, shape, dtype=dtype, device=codes.device
        )
        matrix.codes = codes
        return matrix

    @property
    def fp8(self) -> QuantizedCodes:
        assert isinstance(self.codes, QuantizedCodes) and self.codes.values.dtype is E4M3
        return self.codes

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            return weight._linear(x, *bias)
        if func is torch.Tensor.__getitem__:
            return args[0]._select(args[1])
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise AssertionError(f"{func} is not supported for quantized weights")

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the product. If there is one scale for each output, the codes are multiplied and
        the sums are scaled, so that scales need not be rounded to the dtype of ``x``. Otherwise the
        weights are decoded to that dtype first."""
        codes = self.codes
        if isinstance(codes, Int4Codes) or not codes.has_row_scales:
            return functional.linear(x, codes.decode().to(x.dtype), bias)
        sums = functional.linear(x, codes.values.to(x.dtype)).float() * codes.scales[:, 0]
        return (sums if bias is None else sums + bias).to(x.dtype)

    def _select(self, index: Any) -> torch.Tensor:
        if self.dim() == 2:
            return self.codes.select_rows(index).decode().to(self.dtype)
        outs, ins = self.shape[1:]
        part = self.codes.select_rows(slice(index * outs, (index + 1) * outs))
        return QuantizedMatrix.from_codes(part, (outs, ins), self.dtype)


def load_matrix(
    stack: StoredTensor, device: torch.device, dtype: torch.dtype, name: str
) -> torch.Tensor:
    """Load a matrix for torch in the quantization format ``name``, or with the checkpoint's own
    codes if it is stored in FP8. With int4, parts that are in int4 already keep their codes. Raises
    Invalid if a weight is not finite, or too large for the format."""
    if stack.is_fp8:
        return QuantizedMatrix.from_codes(stack.load_codes(device), stack.shape, dtype)
    if name == "int4":
        return QuantizedMatrix.from_codes(_load_int4(stack, device, dtype), stack.shape, dtype)
    joined = stack.join(device, dtype)
    return joined if name == "none" else QuantizedMatrix.quantize(joined, name)


def _load_int4(stack: StoredTensor, device: torch.device, dtype: torch.dtype) -> Int4Codes:
    ins = stack.shape[-1]
    codes = [
        part
        if isinstance(part, Int4Codes)
        else quantize_int4(part.to(device, dtype).reshape(-1, ins))
        for part in stack.int4_parts
    ]
    stack.mark_used()
    return Int4Codes.join(codes)
