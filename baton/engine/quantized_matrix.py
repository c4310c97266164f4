"""Weights in fewer bits beside torch: decoded for each product, where nothing better is known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from baton.engine.quantization import E4M3, PackedInt4Codes, QuantizedCodes, quantize
from baton.engine.shards import StoredTensor


class QuantizedMatrix(torch.Tensor):
    """Linear weights [outs, ins], or [num_experts, outs, ins], which torch takes for a tensor.

    There are two things to do with it: to multiply (``functional.linear``), and to take some of its
    rows, or one of its matrices, by index. Anything else is a mistake of ours.
    """

    codes: QuantizedCodes | PackedInt4Codes

    @staticmethod
    def of(weight: torch.Tensor, name: str) -> "QuantizedMatrix":
        """Of ``weight``, whose dtype is the run's. Raises Invalid if one is not finite."""
        codes = quantize(weight.reshape(-1, weight.shape[-1]), name)
        kept = PackedInt4Codes.of(codes) if name == "int4" else codes
        return QuantizedMatrix.holding(kept, weight.shape, weight.dtype)

    @staticmethod
    def holding(
        codes: QuantizedCodes | PackedInt4Codes, shape: Sequence[int], dtype: torch.dtype
    ) -> "QuantizedMatrix":
        """``codes`` of all rows of ``shape``, one below the other; ``dtype`` is the run's."""
        made: QuantizedMatrix = torch.Tensor._make_wrapper_subclass(
            QuantizedMatrix, shape, dtype=dtype, device=codes.scales.device
        )
        made.codes = codes
        return made

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
            return args[0]._take(args[1])
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise AssertionError(f"{func} of weights in fewer bits")

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A scale per output is applied to the sums, so that it need not be rounded as ``x`` is."""
        codes = self.codes
        if isinstance(codes, PackedInt4Codes) or not codes.has_row_scales:
            return functional.linear(x, codes.decode().to(x.dtype), bias)
        sums = functional.linear(x, codes.values.to(x.dtype)).float() * codes.scales[:, 0]
        return (sums if bias is None else sums + bias).to(x.dtype)

    def _take(self, index: Any) -> torch.Tensor:
        if self.dim() == 2:
            return self.codes.take(index).decode().to(self.dtype)
        outs, ins = self.shape[1:]
        part = self.codes.take(slice(index * outs, (index + 1) * outs))
        return QuantizedMatrix.holding(part, (outs, ins), self.dtype)


def load_matrix(
    stack: StoredTensor, device: torch.device, dtype: torch.dtype, name: str
) -> torch.Tensor:
    """A matrix for torch, in the format ``name``, or as it is stored if that is FP8. Raises Invalid
    if a weight is not finite."""
    if stack.in_fp8:
        return QuantizedMatrix.holding(stack.codes(device), stack.shape, dtype)
    joined = stack.join(device, dtype)
    return joined if name == "none" else QuantizedMatrix.of(joined, name)
