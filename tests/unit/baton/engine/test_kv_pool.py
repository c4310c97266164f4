"""Tests that the memory file of a pool of KV blocks is closed once the pool and its tensor are
gone, and where its staging area is."""

from pathlib import Path

import pytest
import torch

from baton.core.ids import BlockId
from baton.engine.checksum import block_checksums, range_checksums
from baton.engine.kv_pool import MAX_AUTOMATIC_STAGING_BYTES, KvPool, region_bytes, staging_size
from baton.errors import Invalid
from tests.unit.baton.engine.cuda_cases import make_config


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


def test_a_staging_area_follows_the_blocks() -> None:
    pool = make_pool(staging_bytes=8 * 8_192)
    assert pool.size_bytes == 2 * pool.block_bytes == 2 * 8_192
    assert len(pool.memory) == 10 * 8_192
    pool.memory[-1] = 7
    assert not pool.tensor.any()
    pool.tensor.fill_(1)
    assert pool.memory[-pool.staging_bytes :].sum() == 7
    assert pool.memory.data_ptr() == pool.address


def test_ranges_have_the_checksums_of_the_blocks_in_them() -> None:
    pool = make_pool(staging_bytes=8 * 8_192)
    pool.tensor[1] = 3
    pool.memory[-8_192:] = pool.memory[8_192 : 2 * 8_192]
    ranges = [(8_192, 8_192), (9 * 8_192, 8_192), (9 * 8_192, 8_191)]
    first, copied, shorter = range_checksums(pool, ranges)
    assert [first] == block_checksums(pool, [BlockId(1)])
    assert first == copied != shorter


@pytest.mark.parametrize(
    ("wanted", "num_blocks", "expected"),
    [(0, 100, 0), (None, 10, 800), (None, 1000, 12_500), (900, 10, 900)],
)
def test_the_size_of_a_staging_area(wanted: int | None, num_blocks: int, expected: int) -> None:
    assert staging_size(wanted, num_blocks, 100) == expected


def test_an_automatic_staging_area_is_bounded() -> None:
    assert staging_size(None, 1_000_000, 2**20) == MAX_AUTOMATIC_STAGING_BYTES


def test_a_staging_area_for_less_than_eight_blocks_is_refused() -> None:
    with pytest.raises(Invalid, match="kv_staging_bytes is 799; it must be 0, or at least 800"):
        staging_size(799, 100, 100)


def test_a_staging_area_is_aligned() -> None:
    assert region_bytes(1000, 0) == 1000
    assert region_bytes(1000, 300) == 1024 + 300


def make_pool(staging_bytes: int | None) -> KvPool:
    """Make a pool of two blocks of 8,192 bytes."""
    config = make_config(4, 2, 16, qk_norm=False)
    return KvPool(
        config,
        num_blocks=2,
        block_tokens=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        staging_bytes=staging_bytes,
    )
