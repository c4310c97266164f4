"""Weights in fewer bits where torch computes: decoded for each product."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from baton.checkpoint import ModelConfig
from baton.engine.loader import LayerWeights, Weights
from baton.engine.quantization import Codes, HalvedCodes, encode, of_head

MATRICES = ("qkv", "output", "gate_up", "down", "expert_gate_up", "expert_down")
"""Of a layer, those that are kept in fewer bits."""


class QuantizedMatrix(torch.Tensor):
    """Linear weights [outs, ins], or [num_experts, outs, ins], which torch takes for a tensor.

    There are two things to do with it: to multiply (``functional.linear``), and to take some of its
    rows, or one of its matrices, by index. Anything else is a mistake of ours.
    """

    codes: Codes | HalvedCodes

    @staticmethod
    def of(weight: torch.Tensor, name: str) -> "QuantizedMatrix":
        """Of ``weight``, whose dtype is the run's. Raises Invalid if one is not finite."""
        codes = encode(weight.reshape(-1, weight.shape[-1]), name)
        kept = HalvedCodes.of(codes) if name == "int4" else codes
        return QuantizedMatrix._wrap(kept, weight.shape, weight.dtype)

    @staticmethod
    def _wrap(
        codes: Codes | HalvedCodes, shape: Sequence[int], dtype: torch.dtype
    ) -> "QuantizedMatrix":
        made: QuantizedMatrix = torch.Tensor._make_wrapper_subclass(
            QuantizedMatrix, shape, dtype=dtype
        )
        made.codes = codes
        return made

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
        if isinstance(codes, HalvedCodes):
            return functional.linear(x, codes.decode().to(x.dtype), bias)
        sums = functional.linear(x, codes.values.to(x.dtype)).float() * codes.scales[:, 0]
        return (sums if bias is None else sums + bias).to(x.dtype)

    def _take(self, index: Any) -> torch.Tensor:
        if self.dim() == 2:
            return self.codes.take(index).decode().to(self.dtype)
        outs, ins = self.shape[1:]
        part = self.codes.take(slice(index * outs, (index + 1) * outs))
        return QuantizedMatrix._wrap(part, (outs, ins), self.dtype)


def quantize(weights: Weights, config: ModelConfig, name: str) -> None:
    """In place, a matrix at a time, so that of one at most both forms are in memory."""
    weights.head = QuantizedMatrix.of(weights.head, of_head(name))
    if config.tie_word_embeddings:
        weights.embedding = weights.head
    for layer in weights.layers:
        _quantize_layer(layer, name)


def _quantize_layer(layer: LayerWeights, name: str) -> None:
    for field in MATRICES:
        weight: torch.Tensor | None = getattr(layer, field)
        if weight is not None:
            setattr(layer, field, QuantizedMatrix.of(weight, name))
