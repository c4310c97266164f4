"""The paged KV pool: ``[num_blocks, layers, 2, block_tokens, kv_heads, head_dim]``.

A block is contiguous: one memcpy, one descriptor. On the CPU the pool lies in a memory file
without a name, so that another process of this host can map it, and it is gone with its
owner, however that ends.
"""

import mmap
import os

import torch

from baton.checkpoint import ModelConfig
from baton.errors import Invalid

HEADROOM_BYTES = 256 * 1024 * 1024
"""Of host memory, left to everything else."""


def block_bytes(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    return block_tokens * config.kv_elements_per_token * dtype.itemsize


class KvPool:
    """``tensor`` is the whole pool; ``address`` and ``size_bytes`` tell where it lies.

    Host memory is taken when it is first touched; the size is checked against what is
    available. Raises Invalid when there isn't enough. ``file_descriptor`` is -1 on a GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes(config, dtype, block_tokens)
        self.size_bytes = num_blocks * self.block_bytes
        self.device = str(device) if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.file_descriptor = -1
        self._map: mmap.mmap | None = None
        shape = (
            num_blocks,
            config.num_layers,
            2,
            block_tokens,
            config.num_kv_heads,
            config.head_dim,
        )
        self._check_memory(device)
        if device.type == "cpu":
            self.tensor = self._host_memory(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.address = self.tensor.data_ptr()
        layout = "x".join(str(size) for size in shape[1:])
        self.layout = f"{str(dtype).removeprefix('torch.')}[{layout}]"

    def _host_memory(self, dtype: torch.dtype) -> torch.Tensor:
        self.file_descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.file_descriptor, self.size_bytes)
        self._map = mmap.mmap(self.file_descriptor, self.size_bytes)
        return torch.frombuffer(self._map, dtype=dtype)

    def _check_memory(self, device: torch.device) -> None:
        if device.type == "cuda":
            available = torch.cuda.mem_get_info(device)[0]
        else:
            import psutil  # a pool on a GPU does without it

            available = psutil.virtual_memory().available - HEADROOM_BYTES
        if self.num_blocks < 1:
            raise Invalid(
                f"the KV pool has no room for one block of {self.block_bytes:,} bytes: raise "
                "pool_bytes or num_blocks",
                param="pool_bytes",
            )
        if self.size_bytes > available:
            raise Invalid(
                f"the KV pool needs {self.size_bytes:,} bytes ({self.num_blocks} blocks of "
                f"{self.block_bytes:,}), and {max(available, 0):,} are available on {device}: "
                "lower pool_bytes or num_blocks",
                param="pool_bytes",
            )
