"""LoRA adapters packed for the CPU kernels."""

import ctypes
from collections.abc import Sequence

import torch

from baton.engine.lora.adapter import JOINED, LoraWeights, LowRank
from baton.engine.lora.segments import LoraSegment
from baton.engine.native.library import LoraLayerPointers, LoraSegmentPointers, LowRankPointers
from baton.engine.native.matrix import KernelThreadPool, PackedMatrix


class NativeAdapter:
    """An adapter's matrices, packed for products in ``dtype``. Packing shares the thread pool with
    the model: each matrix is packed between two calls of a step."""

    def __init__(
        self, thread_pool: KernelThreadPool, weights: LoraWeights, dtype: torch.dtype
    ) -> None:
        self._thread_pool, self._dtype = thread_pool, dtype
        self._packed: list[PackedMatrix] = []
        self._layers = (LoraLayerPointers * len(weights.layers))()
        for pointers, layer in zip(self._layers, weights.layers, strict=True):
            for name in JOINED:
                pair: LowRank | None = getattr(layer, name)
                if pair is not None:
                    setattr(pointers, name, self._pointers(pair))

    @property
    def address(self) -> int:
        """The address of the layers' pointers, valid as long as this object lives."""
        return ctypes.addressof(self._layers)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._packed)

    def _pointers(self, pair: LowRank) -> LowRankPointers:
        return LowRankPointers(self._pack(pair.a), self._pack(pair.b), pair.a.shape[0])

    def _pack(self, matrix: torch.Tensor) -> int:
        packed = PackedMatrix(self._thread_pool, matrix, dtype=self._dtype)
        self._packed.append(packed)
        return packed.address


def segment_pointers(
    segments: Sequence[LoraSegment],
) -> "ctypes.Array[LoraSegmentPointers]":
    """Return the segments for the kernels. The caller keeps ``segments`` alive during the call."""
    return (LoraSegmentPointers * len(segments))(
        *[
            LoraSegmentPointers(each.first, each.num_tokens, each.adapter.address)
            for each in segments
        ]
    )
