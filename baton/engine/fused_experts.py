"""Weights of experts that a checkpoint stores in one tensor for all of a layer's experts, as
gpt-oss does: transposed, or in MXFP4 (Open Compute Project 2023, "Microscaling Formats (MX)"). Each
expert's matrix is derived when it is used, so that at most one is in memory twice."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from baton.engine.shards import CheckpointShards, StoredTensor

MXFP4_GROUP_SIZE = 32
"""Number of an output's weights that share a scale, which is a power of two."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The absolute values of the codes, in E2M1; the highest of a code's four bits is the sign."""

SCALE_BIAS = 127


class DerivedMatrix(StoredTensor):
    """A matrix of ``shape`` [rows, ins] in ``dtype`` that ``derive`` computes from stored bytes.
    ``on_used`` is called when it was read."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        derive: Callable[[], torch.Tensor],
        on_used: Callable[[], None],
    ) -> None:
        self.shape = shape
        self.scales = ()
        self._dtype, self._derive, self._on_read = dtype, derive, on_used

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return (self._derive(),)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def join(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        joined = self._derive().to(device=device, dtype=dtype)
        self.mark_used()
        return joined

    def mark_used(self) -> None:
        self._on_read()


class FusedExperts(StoredTensor):
    """The matrices of a layer's experts, [num_experts, rows, ins]."""

    def __init__(self, matrices: Sequence[DerivedMatrix]) -> None:
        self.shape = (len(matrices), *matrices[0].shape)
        self.scales = ()
        self._matrices = matrices

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return [part for matrix in self._matrices for part in matrix.parts]

    @property
    def dtype(self) -> torch.dtype:
        return self._matrices[0].dtype

    def split(self) -> list[StoredTensor]:
        return list(self._matrices)

    def join(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        joined = torch.empty(self.shape, dtype=dtype, device=device)
        for place, matrix in zip(joined, self._matrices, strict=True):
            place.copy_(matrix.join(device, dtype))
        return joined

    def mark_used(self) -> None:
        for matrix in self._matrices:
            matrix.mark_used()


def fused_experts(
    shards: CheckpointShards, name: str, count: int, rows: int, ins: int
) -> FusedExperts:
    """Find the matrices [rows, ins] of ``count`` experts under ``name``. They are stored as
    ``name`` [count, ins, rows], or, in MXFP4, as ``name``_blocks and ``name``_scales. Raises
    Invalid if a tensor is missing or not as expected."""
    if shards.has(name + "_blocks"):
        groups = -(-ins // MXFP4_GROUP_SIZE)
        blocks = shards.bytes_of(name + "_blocks", count, rows, groups, MXFP4_GROUP_SIZE // 2)
        scales = shards.bytes_of(name + "_scales", count, rows, groups)
        codes, exponents = blocks.parts[0], scales.parts[0]

        def decode(index: int) -> torch.Tensor:
            return decode_mxfp4(codes[index], exponents[index])[:, :ins]

        def mark_used() -> None:
            blocks.mark_used()
            scales.mark_used()

        return _fused(count, (rows, ins), torch.bfloat16, decode, mark_used)
    stored = shards.stack([name], [count], ins, rows)
    tensor = stored.parts[0]
    return _fused(count, (rows, ins), stored.dtype, lambda index: tensor[index].T, stored.mark_used)


def _fused(
    count: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    derive: Callable[[int], torch.Tensor],
    on_used: Callable[[], None],
) -> FusedExperts:
    return FusedExperts(
        [DerivedMatrix(shape, dtype, partial(derive, index), on_used) for index in range(count)]
    )


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights [rows, groups * 32] in BF16, which holds them exactly. ``blocks`` [rows,
    groups, 16] have two codes in each byte, the first one in the lower bits; ``scales`` [rows,
    groups] are exponents."""
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    exponents = scales.int().unsqueeze(-1) - SCALE_BIAS
    return torch.ldexp(values[codes], exponents).to(torch.bfloat16).flatten(-2)
