"""The KV pool of a vLLM worker. As in Baton's own pool, a block is contiguous over all layers."""

import os
import weakref

import torch

from baton.engine.kv_pool import check_memory, map_memory_file, region_bytes


class VllmKvPool:
    """Implements :class:`baton.engine.kv_pool.KvMemory`. ``tensor`` is [num_blocks, block_bytes] in
    bytes. The last ``staging_bytes`` of ``memory`` are the staging area. ``file_descriptor`` is
    closed when this object is freed."""

    def __init__(
        self,
        memory: torch.Tensor,
        block_bytes: int,
        block_tokens: int,
        layout: str,
        file_descriptor: int = -1,
        staging_bytes: int = 0,
    ) -> None:
        self.memory = memory.view(torch.uint8)
        self.staging_bytes = staging_bytes
        self.num_blocks = (len(self.memory) - staging_bytes) // block_bytes
        self.tensor = self.memory[: self.num_blocks * block_bytes].view(-1, block_bytes)
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.size_bytes = self.num_blocks * block_bytes
        self.layout = layout
        self.address = self.tensor.data_ptr()
        device = memory.device
        self.device = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self.file_descriptor = file_descriptor
        if file_descriptor >= 0:
            weakref.finalize(self, os.close, file_descriptor)


def create_host_pool(
    num_blocks: int, block_bytes: int, block_tokens: int, layout: str, staging_bytes: int = 0
) -> VllmKvPool:
    """Create a pool in an anonymous memory file, which the transports and all ranks of vLLM map.
    Each rank keeps its heads in its own part of every block, so the layout of a block does not
    depend on the degree of tensor parallelism. The staging area of ``staging_bytes`` follows the
    blocks. Raises Invalid if there is too little memory."""
    check_memory(num_blocks, block_bytes, torch.device("cpu"), staging_bytes)
    file, memory = map_memory_file(region_bytes(num_blocks * block_bytes, staging_bytes))
    return VllmKvPool(memory, block_bytes, block_tokens, layout, file, staging_bytes)
