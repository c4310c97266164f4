"""The base class of the codecs of KV blocks on a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from baton.core.kv_codec import KvCodecName
from baton.engine.cuda.block_stream import on_block_stream
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.header import make_header

ADDRESS_ALIGNMENT_BYTES = 16

TILE_VALUES = 2048
"""Values that a program handles at once, 16 for each thread."""

EXACT_ARITHMETIC = {"enable_fp_fusion": False}
"""The launch option for kernels that multiply and add: a fused multiplication and addition is
rounded once, where the CPU rounds twice."""


class GpuCodec(ABC):
    """A :class:`~baton.kv_codec.base.BlockCodec` for blocks in the memory of a GPU. All addresses
    are multiples of ADDRESS_ALIGNMENT_BYTES. A subclass launches the kernels.

    Kernels run on the stream for work on KV blocks, beside the engine's steps. So the caller
    encodes only blocks whose step has ended, as it is with blocks that the engine has sealed. A
    call waits for its kernels: what it has encoded can be sent, and attention may read what it has
    decoded. Several threads may call at once.
    """

    def __init__(
        self,
        name: KvCodecName,
        block_format: BlockFormat,
        device: torch.device,
        min_encoded_bytes: int,
        max_encoded_bytes: int,
    ) -> None:
        self.name = name
        self.max_encoded_bytes = max_encoded_bytes
        self._min_encoded_bytes = min_encoded_bytes
        self._device = device
        header = list(make_header(name, block_format))
        self._header = torch.tensor(header, dtype=torch.uint8, device=device)

    def encode(self, blocks: Sequence[int], targets: Sequence[int]) -> list[int]:
        assert len(blocks) == len(targets)
        if not blocks:
            return []
        with on_block_stream(self._device):
            return self._encode(self._addresses(blocks), self._addresses(targets))

    def decode(
        self, sources: Sequence[int], sizes_bytes: Sequence[int], blocks: Sequence[int]
    ) -> list[bool]:
        assert len(sources) == len(sizes_bytes) == len(blocks)
        valid = [self._min_encoded_bytes <= s <= self.max_encoded_bytes for s in sizes_bytes]
        chosen = [index for index, has_valid_size in enumerate(valid) if has_valid_size]
        if not chosen:
            return valid
        with on_block_stream(self._device):
            is_valid = torch.ones(len(chosen), dtype=torch.int32, device=self._device)
            self._decode(
                self._addresses([sources[index] for index in chosen]),
                torch.tensor([sizes_bytes[index] for index in chosen], device=self._device),
                self._addresses([blocks[index] for index in chosen]),
                is_valid,
            )
            for index, decoded in zip(chosen, is_valid.tolist(), strict=True):
                valid[index] = bool(decoded)
        return valid

    @abstractmethod
    def _encode(self, blocks: torch.Tensor, targets: torch.Tensor) -> list[int]:
        """Encode blocks. ``blocks`` and ``targets`` are addresses in the GPU's memory. Wait for the
        kernels, and return the encoded sizes."""

    @abstractmethod
    def _decode(
        self,
        sources: torch.Tensor,
        sizes_bytes: torch.Tensor,
        blocks: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> None:
        """Decode blocks whose sizes are possible, and change ``is_valid`` [num_blocks] from 1 to 0
        for invalid encodings. Do not wait for the kernels."""

    def _addresses(self, addresses: Sequence[int]) -> torch.Tensor:
        assert all(address % ADDRESS_ALIGNMENT_BYTES == 0 for address in addresses)
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def _wait(self) -> None:
        """Wait for the kernels that this thread has launched."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
