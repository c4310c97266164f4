"""Tests that blocks arrive as they were over the gRPC transport, in the real codecs."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from baton.clock import SystemClock
from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.errors import Corrupt
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.registry import open_portable_codecs
from baton.transport.base import Transport
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports
from baton.worker.block_encoder import BlockEncoder
from baton.worker.block_reader import BlockReader, BlockSource
from baton.worker.kv_layout import KvLayout
from baton.worker.staging_area import StagingArea
from prefill_worker.export_encoder import ExportCodec, ExportEncoder

CLOCK = SystemClock()
FORMAT = BlockFormat("bfloat16", 2, 16, 2, 64)
NUM_BLOCKS = 6
POOL_BYTES = NUM_BLOCKS * FORMAT.size_bytes
CODECS = open_portable_codecs(FORMAT)
SEED = 4


class Side:
    """One worker's pool with its staging area, and the gRPC transport that serves it."""

    def __init__(self, name: str) -> None:
        self.memory = HostMemory(name, 5 * POOL_BYTES)
        view = self.memory.view

        def checksums(ranges: list[tuple[int, int]]) -> list[int]:
            return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at, size in ranges]

        def block_checksums(block_ids: list[BlockId]) -> list[int]:
            return checksums([(each * FORMAT.size_bytes, FORMAT.size_bytes) for each in block_ids])

        self.layout = KvLayout(
            "test", FORMAT.size_bytes, CHECKSUM_XXH3, block_checksums,  # type: ignore[arg-type]
            self.memory.region.address, checksums,  # type: ignore[arg-type]
        )  # fmt: skip
        self.staging = StagingArea(POOL_BYTES, 4 * POOL_BYTES)
        self.pool = np.frombuffer(view, dtype=np.uint16)[: POOL_BYTES // 2]
        opened = open_transports(
            ["grpc"], owner=name, generation=1, region=self.memory.region, clock=CLOCK,
            listen_host="127.0.0.1",
        )  # fmt: skip
        self.transport: Transport = opened["grpc"]


@pytest.mark.parametrize("codec", [KvCodecName.LOSSLESS, KvCodecName.FP8])
async def test_blocks_arrive_over_grpc(codec: KvCodecName) -> None:
    print(f"seed {SEED}")
    source, reader = Side("source"), Side("reader")
    values = np.random.default_rng(SEED).standard_normal(POOL_BYTES // 2, dtype=np.float32)
    source.pool[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
    export_codec = ExportCodec(codec, KvCodecName.LOSSLESS, NUM_BLOCKS - 1)
    encoder = ExportEncoder(BlockEncoder(source.layout, source.staging, CODECS), export_codec)
    decoder = BlockReader(reader.layout, reader.staging, CODECS, CLOCK, 5.0)
    block_ids = [BlockId(index) for index in range(NUM_BLOCKS)]
    refs = await encoder.block_refs(block_ids, [BlockKey(b"k" * 16)] * 5, block_ids)
    lossless = KvCodecName.LOSSLESS
    assert [ref.codec for ref in refs] == [lossless, codec, codec, codec, codec, lossless]
    decoder.check(refs, decoder.accepted(exact=False))
    peer = reader.transport.connect(source.transport.export())
    remote = BlockSource(reader.transport, peer, 5.0)
    result = await decoder.read(remote, refs, block_ids)
    assert (result.bad, result.num_good) == ((), NUM_BLOCKS)
    same = (source.pool == reader.pool).reshape(NUM_BLOCKS, -1).all(axis=1)
    assert list(same) == [ref.codec is lossless for ref in refs]
    wrong = replace(refs[2], checksum=refs[2].checksum ^ 1)
    again = await decoder.read(remote, [refs[1], wrong, refs[3]], block_ids[:3])
    assert (again.bad, again.num_good) == ((1, 2), 1)
    with pytest.raises(Corrupt, match="in codec int4; this worker accepts none"):
        decoder.check([replace(refs[0], codec=KvCodecName.INT4)], ())
    encoder.acknowledge(3)
    encoder.close()
    for side in (reader, source):
        side.staging.check_integrity()
        assert side.staging.used_bytes == 0
        side.transport.close()
