"""The KV pool of a vLLM worker: one block of all layers is contiguous, as in Baton's own pool."""

import mmap

import torch

from baton.engine.kv_pool import check_memory
from baton.system.memory_file import create_memory_file


class VllmKvPool:
    """Host memory for KV blocks of ``block_bytes`` bytes each, as ``tensor`` [num_blocks,
    block_bytes] of bytes. It implements :class:`baton.engine.kv_pool.KvMemory`.

    The memory is an anonymous memory file. All ranks of vLLM map the same file, and each keeps its
    heads in its own part of every block; so the layout of a block does not depend on the degree of
    tensor parallelism. Raises Invalid if there is too little memory."""

    def __init__(self, num_blocks: int, block_bytes: int, block_tokens: int, layout: str) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.size_bytes = num_blocks * block_bytes
        self.device = "cpu"
        self.layout = layout
        check_memory(num_blocks, block_bytes, torch.device("cpu"))
        self.file_descriptor = create_memory_file("baton-kv", self.size_bytes)
        self._map = mmap.mmap(self.file_descriptor, self.size_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8).view(num_blocks, block_bytes)
        self.address = self.tensor.data_ptr()
