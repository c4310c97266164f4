"""The codec FP8 on a GPU; see :mod:`baton.kv_codec.fp8_layout`."""

import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.kv_codec import fp8_kernels as kernels
from baton.engine.cuda.kv_codec.gpu_codec import EXACT_ARITHMETIC, TILE_VALUES, GpuCodec
from baton.engine.cuda.launch import KernelLauncher, power_of_2
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.fp8_layout import MAX_SCALE, MIN_SCALE, fp8_layout

_encode = KernelLauncher(kernels.encode)
_decode = KernelLauncher(kernels.decode)


class GpuFp8Codec(GpuCodec):
    def __init__(self, block_format: BlockFormat, device: torch.device) -> None:
        layout = fp8_layout(block_format)
        size = layout.encoded_bytes
        super().__init__(KvCodecName.FP8, block_format, device, size, size)
        self._programs_per_block = layout.num_planes * layout.kv_heads
        columns = power_of_2(layout.head_dim)
        self._constants = {
            "PLANES": layout.num_planes,
            "TOKENS": layout.block_tokens,
            "HEADS": layout.kv_heads,
            "HEAD_DIM": layout.head_dim,
            "SCALES": layout.scales,
            "CODES": layout.codes,
            "MIN_SCALE": MIN_SCALE,
            "MAX_SCALE": MAX_SCALE,
            "FLOAT32": block_format.dtype == "float32",
            "ROWS": min(power_of_2(layout.block_tokens), max(1, TILE_VALUES // columns)),
            "COLUMNS": columns,
            **EXACT_ARITHMETIC,
        }

    def _encode(self, blocks: torch.Tensor, targets: torch.Tensor) -> list[int]:
        grid = (len(blocks) * self._programs_per_block,)
        _encode[grid](blocks, targets, self._header, **self._constants)
        self._wait()
        return [self.max_encoded_bytes] * len(blocks)

    def _decode(
        self,
        sources: torch.Tensor,
        sizes_bytes: torch.Tensor,
        blocks: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> None:
        grid = (len(blocks) * self._programs_per_block,)
        _decode[grid](sources, blocks, self._header, is_valid, **self._constants)
