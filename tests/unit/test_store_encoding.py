"""Tests that workers encode blocks for the store, and read what they encoded."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.core.store import RAW_ONLY
from baton.kv_codec.block_format import parse_layout
from baton.kv_codec.registry import open_portable_codecs
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from prefill_worker.staged_read import BlockReader
from prefill_worker.store_encoder import StoreEncoder

NAME = "float32[2x2x16x2x32]"
FORMAT = parse_layout(NAME)
assert FORMAT is not None
CODECS = open_portable_codecs(FORMAT)
SIZE = FORMAT.size_bytes
NUM_BLOCKS = 4
LOSSLESS, INT4, NONE = KvCodecName.LOSSLESS, KvCodecName.INT4, KvCodecName.NONE
KEYS = [BlockKey(bytes([n]) * 16) for n in range(NUM_BLOCKS)]


class Pool:
    """A KV pool of four blocks of normal values, with a staging area."""

    def __init__(self, staged_blocks: int = 16) -> None:
        self.memory = np.zeros(NUM_BLOCKS * SIZE + staged_blocks * SIZE, np.uint8)
        values = np.random.default_rng(5).standard_normal(NUM_BLOCKS * SIZE // 4, np.float32)
        self.memory[: NUM_BLOCKS * SIZE] = values.view(np.uint8)
        self.staging = StagingArea(NUM_BLOCKS * SIZE, staged_blocks * SIZE)
        self.layout = KvLayout(
            NAME, SIZE, CHECKSUM_XXH3, self._blocks, self.memory.ctypes.data, self._ranges
        )

    def _blocks(self, block_ids: Sequence[BlockId]) -> list[int]:
        return self._ranges([(block_id * SIZE, SIZE) for block_id in block_ids])

    def _ranges(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self.memory[at : at + size].data) for at, size in ranges]


IDS = [BlockId(n) for n in range(NUM_BLOCKS)]


@pytest.mark.parametrize(
    ("codec", "exact", "expected"),
    [
        (NONE, False, [NONE] * 4),
        (LOSSLESS, True, [LOSSLESS] * 4),
        (INT4, False, [LOSSLESS, INT4, INT4, INT4]),
        (INT4, True, [LOSSLESS] * 4),
    ],
)
def test_blocks_are_encoded_and_read_again(
    codec: KvCodecName, exact: bool, expected: list[KvCodecName]
) -> None:
    async def main() -> None:
        source, target = Pool(), Pool()
        target.memory[:] = 0
        encoder = StoreEncoder(source.layout, codec, CODECS, source.staging)
        staged = await encoder.stage(IDS, KEYS, 0, exact=exact)
        assert [ref.codec for ref in staged.refs] == expected
        assert [ref.key for ref in staged.refs] == KEYS
        reader = BlockReader(target.layout, CODECS, target.staging)
        assert reader.codecs == RAW_ONLY | set(CODECS) and reader.accepts(staged.refs)
        done = 0
        while done < NUM_BLOCKS:
            count = reader.num_fitting(staged.refs[done:])
            read = await reader.begin(staged.refs[done : done + count], IDS[done : done + count], 1)
            for each in read.ranges():
                data = source.memory[each.remote_offset : each.remote_offset + each.size_bytes]
                target.memory[each.local_offset : each.local_offset + each.size_bytes] = data
            assert read.verify(CHECKSUM_XXH3, 0, count) == [True] * count
            assert read.verify("another", 0, count) == [False] * count
            read.release()
            done += count
        staged.release()
        for pool in (source, target):
            assert pool.staging.used_bytes == 0
            pool.staging.check_integrity()
        for n, name in enumerate(expected):
            pair = [pool.memory[n * SIZE : (n + 1) * SIZE] for pool in (source, target)]
            assert bool((pair[0] == pair[1]).all()) is not name.is_lossy

    asyncio.run(main())


def test_damaged_bytes_are_not_decoded() -> None:
    async def main() -> None:
        pool = Pool()
        staged = await StoreEncoder(pool.layout, LOSSLESS, CODECS, pool.staging).stage(
            IDS[:1], KEYS[:1], 0, exact=True
        )
        ref = staged.refs[0]
        read = await BlockReader(pool.layout, CODECS, pool.staging).begin([ref], IDS[:1], 1)
        (span,) = read.ranges()
        data = pool.memory[ref.offset_bytes : ref.offset_bytes + ref.size_bytes].copy()
        data[100] ^= 1
        pool.memory[span.local_offset : span.local_offset + span.size_bytes] = data
        assert read.verify(CHECKSUM_XXH3, 0, 1) == [False]

    asyncio.run(main())


def test_full_staging_area_encodes_fewer_blocks_at_a_time() -> None:
    async def main() -> None:
        pool = Pool(staged_blocks=3)
        staged = await StoreEncoder(pool.layout, LOSSLESS, CODECS, pool.staging).stage(
            IDS, KEYS, 0, exact=True
        )
        assert [ref.codec for ref in staged.refs] == [LOSSLESS, LOSSLESS]
        staged.release()
        assert pool.staging.used_bytes == 0

    asyncio.run(main())


def test_worker_without_a_staging_area_reads_and_stores_raw_blocks() -> None:
    async def main() -> None:
        pool = Pool()
        staged = await StoreEncoder(pool.layout, LOSSLESS).stage(IDS, KEYS, 0, exact=False)
        assert [ref.codec for ref in staged.refs] == [NONE] * 4
        assert BlockReader(pool.layout, CODECS).codecs == RAW_ONLY

    asyncio.run(main())
