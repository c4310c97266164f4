"""The KV pool of a vLLM worker. As in Baton's own pool, a block is contiguous over all layers."""

import os
import weakref

import torch

from baton.engine.kv_pool import check_memory, map_memory_file


class VllmKvPool:
    """Implements :class:`baton.engine.kv_pool.KvMemory`. ``tensor`` is [num_blocks, block_bytes] in
    bytes. ``file_descriptor`` is closed when this object is freed."""

    def __init__(
        self,
        memory: torch.Tensor,
        block_bytes: int,
        block_tokens: int,
        layout: str,
        file_descriptor: int = -1,
    ) -> None:
        self.tensor = memory.view(torch.uint8).view(-1, block_bytes)
        self.num_blocks = self.tensor.shape[0]
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
    num_blocks: int, block_bytes: int, block_tokens: int, layout: str
) -> VllmKvPool:
    """Create a pool in an anonymous memory file, which the transports and all ranks of vLLM map.
    Each rank keeps its heads in its own part of every block, so the layout of a block does not
    depend on the degree of tensor parallelism. Raises Invalid if there is too little memory."""
    check_memory(num_blocks, block_bytes, torch.device("cpu"))
    file, memory = map_memory_file(num_blocks * block_bytes)
    return VllmKvPool(memory, block_bytes, block_tokens, layout, file)
