"""Tests how blocks are encoded for a reader, for KV exports and for the store: in which codecs, how
many at a time, and who frees the staging area."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import DeadlineExceeded, Unavailable
from baton.worker.block_encoder import STAGING_WAIT_SECONDS, BlockEncoder
from prefill_worker.export_encoder import ExportCodec, ExportEncoder
from prefill_worker.store_encoder import StoreEncoder
from tests.sim.virtual_time import simulate
from tests.staged_pool import CLOCK, IDS, KEYS, SIZE, StagedPool, two_pools

NONE, LOSSLESS, FP8, INT4, _ = KvCodecName


def codecs_of(refs: Sequence[BlockRef]) -> list[KvCodecName]:
    return [ref.codec for ref in refs]


def occupy(pool: StagedPool, num_free: int) -> None:
    """Allocate all but ``num_free`` blocks of the part of the staging area for readers."""
    size = pool.staging.readers_bytes - num_free * SIZE
    assert pool.staging.try_allocate(size, for_reader=True) is not None


# -- the encoder ---------------------------------------------------------------------------------


def test_each_block_is_in_its_codec_or_raw() -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        pool.bytes[3 * SIZE : 4 * SIZE] = 7  # it ends with no zeros, so LOSSLESS is not smaller
        wanted = [LOSSLESS, NONE, INT4, LOSSLESS, FP8]
        staged = await pool.encoder().encode(IDS[:5], KEYS[:4], wanted)
        assert codecs_of(staged.refs) == [LOSSLESS, NONE, INT4, NONE, FP8]
        assert [ref.key for ref in staged.refs] == [*KEYS[:4], BlockKey(b"")]
        assert [ref.offset_bytes for ref in staged.refs if ref.codec is NONE] == [SIZE, 3 * SIZE]
        assert pool.staging.used_bytes == 3 * SIZE
        for ref in staged.refs:
            assert pool._checksums([(ref.offset_bytes, ref.size_bytes)]) == [ref.checksum]
        staged.release()
        pool.check_free()

    simulate(main())


@pytest.mark.parametrize(("num_free", "expected"), [(24, 8), (8, 8), (5, 5), (1, 1)])
def test_as_many_blocks_are_encoded_as_have_space(num_free: int, expected: int) -> None:
    """Readers have 24 of 32 blocks, and a chunk gets at most a third of them."""

    async def main() -> None:
        pool, _ = two_pools(32)
        if num_free < 24:
            occupy(pool, num_free)
        staged = await pool.encoder().encode(IDS, KEYS, [LOSSLESS] * 16)
        assert codecs_of(staged.refs) == [LOSSLESS] * expected

    simulate(main())


def test_encoding_without_space_in_time_fails() -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        occupy(pool, 0)
        with pytest.raises(DeadlineExceeded):
            await pool.encoder().encode(IDS, KEYS, [LOSSLESS] * 16)
        assert CLOCK.monotonic() == pytest.approx(STAGING_WAIT_SECONDS, abs=0.01)
        raw = await pool.encoder().encode(IDS[:3], KEYS, [NONE] * 3)
        assert codecs_of(raw.refs) == [NONE] * 3

    simulate(main())


@pytest.mark.parametrize("num_ticks", range(6))
def test_cancelled_encoding_frees_its_space(num_ticks: int) -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        encoding = asyncio.create_task(pool.encoder().encode(IDS, KEYS, [LOSSLESS] * 16))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        encoding.cancel()
        try:
            (await encoding).release()
        except asyncio.CancelledError:
            pass
        pool.check_free()

    simulate(main())


def test_codecs_that_do_not_fit_are_left_out() -> None:
    assert two_pools(0)[0].encoder().codecs == frozenset()
    assert BlockEncoder(two_pools()[0].layout).codecs == frozenset()
    assert two_pools()[0].encoder().codecs == set(KvCodecName) - {NONE}


# -- a KV export ---------------------------------------------------------------------------------


def export(pool: StagedPool, codec: KvCodecName = LOSSLESS) -> ExportEncoder:
    return ExportEncoder(pool.encoder(), ExportCodec(codec, LOSSLESS, first_recent_span=6))


async def next_refs(encoder: ExportEncoder, first: int, last: int) -> tuple[BlockRef, ...]:
    spans = list(range(first, last))
    return await encoder.block_refs([BlockId(n) for n in spans], KEYS[first:last], spans)


def test_first_and_recent_spans_of_an_export_are_exact() -> None:
    async def main() -> None:
        pool, _ = two_pools(64)
        refs = await next_refs(export(pool, INT4), 0, 8)
        assert codecs_of(refs) == [LOSSLESS, *[INT4] * 5, LOSSLESS, LOSSLESS]

    simulate(main())


def test_a_chunk_is_freed_once_all_of_it_is_acknowledged() -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        encoder = export(pool)
        assert [len(await next_refs(encoder, first, 16)) for first in (0, 8)] == [8, 8]
        assert pool.staging.used_bytes == 16 * SIZE
        for num_acknowledged, num_held in ((7, 16), (8, 8), (15, 8), (16, 0)):
            encoder.acknowledge(num_acknowledged)
            assert pool.staging.used_bytes == num_held * SIZE

    simulate(main())


def test_an_export_waits_for_its_own_reader_but_not_for_others() -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        mine, other = export(pool), export(pool)
        await next_refs(mine, 0, 8)
        occupy(pool, 8)
        raw = await next_refs(other, 0, 16)
        assert codecs_of(raw) == [NONE] * 16
        assert CLOCK.monotonic() == pytest.approx(STAGING_WAIT_SECONDS, abs=0.01)
        waiting = asyncio.create_task(next_refs(mine, 8, 16))
        await CLOCK.sleep(10)
        assert not waiting.done()
        mine.acknowledge(8)
        assert codecs_of(await waiting) == [LOSSLESS] * 8

    simulate(main())


@pytest.mark.parametrize("num_ticks", [0, 1, 2, 3, 4, 50])
def test_a_closed_export_has_no_space(num_ticks: int) -> None:
    async def main() -> None:
        pool, _ = two_pools(32)
        encoder = export(pool)
        await next_refs(encoder, 0, 8)
        encoding = asyncio.create_task(next_refs(encoder, 8, 16))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        encoder.close()
        if num_ticks < 50:
            with pytest.raises(Unavailable, match="aborted"):
                await encoding
        pool.check_free()

    simulate(main())


# -- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "exact", "first", "expected"),
    [
        (NONE, False, 0, [NONE] * 4),
        (LOSSLESS, True, 0, [LOSSLESS] * 4),
        (INT4, False, 0, [LOSSLESS, INT4, INT4, INT4]),
        (INT4, False, 1, [INT4] * 4),
        (INT4, True, 1, [LOSSLESS] * 4),
    ],
)
def test_blocks_for_the_store_are_encoded_and_read_again(
    codec: KvCodecName, exact: bool, first: int, expected: list[KvCodecName]
) -> None:
    async def main() -> None:
        source, target = two_pools(32)
        staged = await StoreEncoder(source.encoder(), codec).stage(
            IDS[:4], KEYS[:4], first, exact=exact
        )
        assert codecs_of(staged.refs) == expected
        assert [ref.key for ref in staged.refs] == KEYS[:4]
        read = await target.reader().read(target.source(source), staged.refs, IDS[:4])
        assert read.num_good == 4
        staged.release()
        for pool in (source, target):
            pool.check_free()
        for number, name in enumerate(expected):
            assert (source.block(number) == target.block(number)) is not name.is_lossy

    simulate(main())


def test_full_staging_area_lets_blocks_be_stored_raw() -> None:
    async def main() -> None:
        pool, _ = two_pools()
        occupy(pool, 0)
        staged = await StoreEncoder(pool.encoder(), LOSSLESS).stage(IDS, KEYS, 0, exact=True)
        assert codecs_of(staged.refs) == [NONE] * 16
        staged.release()

    simulate(main())


def test_worker_without_a_staging_area_stores_raw_blocks() -> None:
    async def main() -> None:
        encoder = StoreEncoder(BlockEncoder(two_pools()[0].layout), LOSSLESS)
        staged = await encoder.stage(IDS, KEYS, 0, exact=False)
        assert codecs_of(staged.refs) == [NONE] * 16

    simulate(main())
