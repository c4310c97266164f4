"""The lossless codec on a GPU; see :mod:`baton.kv_codec.lossless_layout`."""

import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.kv_codec import lossless_kernels as kernels
from baton.engine.cuda.kv_codec.gpu_codec import TILE_VALUES, GpuCodec
from baton.engine.cuda.launch import KernelLauncher, ceil_div, power_of_2
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import CHUNK_VALUES
from baton.kv_codec.lossless_layout import lossless_layout

_choose_windows = KernelLauncher(kernels.choose_windows)
_encode = KernelLauncher(kernels.encode)
_count_escapes = KernelLauncher(kernels.count_escapes)
_decode = KernelLauncher(kernels.decode)


class GpuLosslessCodec(GpuCodec):
    def __init__(self, block_format: BlockFormat, device: torch.device) -> None:
        layout = lossless_layout(block_format)
        size = block_format.size_bytes
        super().__init__(KvCodecName.LOSSLESS, block_format, device, layout.escapes, size)
        values = block_format.plane_values
        part = min(power_of_2(values), TILE_VALUES)
        is_float32 = block_format.dtype == "float32"
        sampled_chunks = ceil_div(layout.num_chunks, layout.sample_stride)
        self._layout = layout
        self._parts = ceil_div(values, part)
        self._shape = {"PLANES": layout.num_planes, "VALUES": values, "PARTS": self._parts}
        self._sample = {
            "SAMPLE_STRIDE": layout.sample_stride,
            "FLOAT32": is_float32,
            "SAMPLE": power_of_2(sampled_chunks * CHUNK_VALUES),
            "N": part,
        }
        self._codes = {"CODES": layout.codes, "N": part}
        self._offsets = {
            "ENDS": layout.ends,
            "FIRSTS": layout.firsts,
            "CODES": layout.codes,
            "RESTS": layout.rests,
            "LOW_HALVES": layout.low_halves,
            "ESCAPES": layout.escapes,
            "FLOAT32": is_float32,
            "N": part,
        }

    def _encode(self, blocks: torch.Tensor, targets: torch.Tensor) -> list[int]:
        layout = self._layout
        planes = len(blocks) * layout.num_planes
        firsts = torch.empty(planes, dtype=torch.int32, device=self._device)
        counts = self._make_counts(len(blocks))
        _choose_windows[(planes,)](blocks, firsts, counts, **self._shape, **self._sample)
        ends = counts.cumsum(dim=1)
        _encode[(planes * self._parts,)](
            blocks, targets, self._header, firsts, counts, ends,
            **self._shape, MAX_ESCAPES=layout.max_escapes, **self._offsets,
        )  # fmt: skip
        totals: list[int] = ends[:, -1].tolist()  # this waits for the kernels
        return [layout.escapes + n if n <= layout.max_escapes else 0 for n in totals]

    def _decode(
        self,
        sources: torch.Tensor,
        sizes_bytes: torch.Tensor,
        blocks: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> None:
        grid = (len(blocks) * self._layout.num_planes * self._parts,)
        counts = self._make_counts(len(blocks))
        _count_escapes[grid](sources, counts, **self._shape, **self._codes)
        ends = counts.cumsum(dim=1)
        _decode[grid](
            sources, sizes_bytes, blocks, self._header, counts, ends, is_valid,
            **self._shape, **self._offsets,
        )  # fmt: skip

    def _make_counts(self, num_blocks: int) -> torch.Tensor:
        """Return space for the numbers of escapes of all parts."""
        shape = (num_blocks, self._layout.num_planes * self._parts)
        return torch.empty(shape, dtype=torch.int32, device=self._device)
