"""Tests that the memory file of a pool of KV blocks is closed once the pool and its tensor are
gone."""

from pathlib import Path

import torch

from baton.engine.kv_pool import KvPool
from tests.unit.cuda_cases import make_config


def test_a_pool_closes_its_memory_file() -> None:
    """Otherwise its memory would not be freed before the process ends."""
    config = make_config(4, 2, 16, qk_norm=False)
    before = num_memory_files()
    pool = KvPool(
        config, num_blocks=2, block_tokens=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert num_memory_files() > before
    tensor = pool.tensor
    del pool
    tensor.fill_(1)
    del tensor
    assert num_memory_files() == before


def num_memory_files() -> int:
    files = Path("/proc/self/fd").iterdir()
    return sum("memfd:baton-kv" in str(file.readlink()) for file in files if file.is_symlink())
