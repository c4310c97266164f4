"""The codecs INT4 and INT2 on a GPU; see :mod:`baton.kv_codec.rotated_layout`."""

import numpy as np
import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.kv_codec import rotated_kernels as kernels
from baton.engine.cuda.kv_codec.gpu_codec import EXACT_ARITHMETIC, TILE_VALUES, GpuCodec
from baton.engine.cuda.launch import KernelLauncher, power_of_2
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.rotated_layout import MAGNITUDES, MEAN_BITS, RotatedLayout

_encode = KernelLauncher(kernels.encode)
_decode = KernelLauncher(kernels.decode)

CODEBOOK_SIZE = 8
"""The most magnitudes of a codebook, those with 4 bits."""


class GpuRotatedCodec(GpuCodec):
    def __init__(
        self,
        name: KvCodecName,
        block_format: BlockFormat,
        layout: RotatedLayout,
        device: torch.device,
    ) -> None:
        size = layout.encoded_bytes
        super().__init__(name, block_format, device, size, size)
        self._programs_per_block = layout.num_planes * layout.num_groups
        self._mean_factor = float(np.float32(1 / layout.block_tokens))
        codebooks = np.stack([_codebook(MEAN_BITS), _codebook(layout.bits)])
        self._codebooks = torch.from_numpy(codebooks).to(device)
        rows = max(1, TILE_VALUES // layout.group)
        self._constants = {
            "PLANES": layout.num_planes,
            "TOKENS": layout.block_tokens,
            "ROW": layout.row,
            "GROUP": layout.group,
            "STAGES": layout.group.bit_length() - 1,
            "BITS": layout.bits,
            "MEAN_BITS": MEAN_BITS,
            "SCALES": layout.scales,
            "CODES": layout.codes,
            "FLOAT32": block_format.dtype == "float32",
            "ROWS": min(power_of_2(layout.block_tokens), rows),
            **EXACT_ARITHMETIC,
        }

    def _encode(self, blocks: torch.Tensor, targets: torch.Tensor) -> list[int]:
        _encode[(len(blocks) * self._programs_per_block,)](
            blocks, targets, self._header, self._codebooks, self._mean_factor, **self._constants
        )
        self._wait()
        return [self.max_encoded_bytes] * len(blocks)

    def _decode(
        self,
        sources: torch.Tensor,
        sizes_bytes: torch.Tensor,
        blocks: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> None:
        _decode[(len(blocks) * self._programs_per_block,)](
            sources, blocks, self._header, self._codebooks, is_valid, **self._constants
        )


def _codebook(bits: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return magnitudes and the thresholds between them, [2, CODEBOOK_SIZE], padded with zeros."""
    book = np.zeros((2, CODEBOOK_SIZE), np.float32)
    magnitudes = np.array(MAGNITUDES[bits], np.float32)
    book[0, : len(magnitudes)] = magnitudes
    book[1, : len(magnitudes) - 1] = (magnitudes[1:] + magnitudes[:-1]) * np.float32(0.5)
    return book
