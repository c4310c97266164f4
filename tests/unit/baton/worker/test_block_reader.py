"""Tests how blocks of other processes are read into the KV pool: in which groups, what counts as
good, and who frees the staging area when a read fails or is cancelled at any moment."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.errors import Corrupt, DeadlineExceeded, Invalid
from baton.transport.reads import TransferFailed
from baton.worker.block_reader import BlockReader
from baton.worker.read_times import link_seconds
from tests.sim.virtual_time import simulate
from tests.staged_pool import CLOCK, CODECS, IDS, KEYS, SIZE, StagedPool, two_pools

NONE, LOSSLESS, FP8, INT4, INT2 = KvCodecName
MIXED = [LOSSLESS, NONE, LOSSLESS, LOSSLESS, NONE, INT4, FP8, LOSSLESS]


async def encoded(pool: StagedPool, codecs: Sequence[KvCodecName]) -> list[BlockRef]:
    """Return references to the first blocks of the pool, encoded in ``codecs``."""
    count = len(codecs)
    refs: list[BlockRef] = []
    while len(refs) < count:
        rest = slice(len(refs), count)
        refs += (await pool.encoder().encode(IDS[rest], KEYS[rest], codecs[rest])).refs
    return refs


@pytest.mark.parametrize("staged_blocks", [32, 200])
def test_raw_and_encoded_blocks_are_read_and_decoded(staged_blocks: int) -> None:
    async def main() -> None:
        source, target = two_pools(staged_blocks)
        refs = await encoded(source, MIXED)
        assert [ref.codec for ref in refs] == MIXED
        reader = target.reader()
        reader.check(refs, reader.accepted(exact=False))
        read = await reader.read(target.source(source), refs, IDS[: len(MIXED)])
        assert (read.num_blocks, read.bad, read.num_good) == (8, (), 8)
        for number, codec in enumerate(MIXED):
            assert (source.block(number) == target.block(number)) is not codec.is_lossy
        target.check_free()

    simulate(main())


def test_blocks_after_a_bad_one_in_its_group_are_read_again() -> None:
    """A group is two blocks."""

    async def main() -> None:
        source, target = two_pools()
        refs = await encoded(source, [NONE] * 7)
        for number in (2, 5):
            refs[number] = replace(refs[number], checksum=refs[number].checksum ^ 1)
        read = await target.reader().read(target.source(source), refs, IDS[:7])
        assert (read.bad, read.num_good) == ((2, 3, 5), 2)

    simulate(main())


def test_an_invalid_encoding_with_the_right_checksum_is_bad() -> None:
    async def main() -> None:
        source, target = two_pools()
        (ref,) = await encoded(source, [LOSSLESS])
        read = await target.reader().read(
            target.source(source), [replace(ref, codec=INT4)], IDS[:1]
        )
        assert read.bad == (0,)
        target.check_free()

    simulate(main())


def test_two_groups_are_under_way_across_reads_and_in_their_order() -> None:
    async def main() -> None:
        source, target = two_pools()
        refs = await encoded(source, [NONE] * 10)
        reader, remote, held = target.reader(), target.source(source), target.transport.held
        target.transport.holds = True
        async with asyncio.TaskGroup() as tasks:
            reading = [
                tasks.create_task(reader.read(remote, refs[first:last], IDS[first:last]))
                for first, last in ((0, 6), (6, 10))
            ]
            started: list[int] = []
            for _ in range(5):
                await CLOCK.sleep(0.1)
                assert len(held) == min(2, 5 - len(started))
                started.append(held[0].ranges[0].remote_offset // SIZE)
                target.transport.let_through()
        assert started == [0, 2, 4, 6, 8]
        first, second = (each.result() for each in reading)
        assert (first.num_good, second.num_good) == (6, 4)
        assert link_seconds([*first.times, *second.times]) == pytest.approx(0.5, abs=0.01)

    simulate(main())


def test_two_groups_fit_in_the_part_for_own_use() -> None:
    """The part has 8 blocks; encodings take one each, and a group of two blocks fits twice."""

    async def main() -> None:
        source, target = two_pools(32)
        refs = await encoded(source, [LOSSLESS] * 6)
        target.transport.holds = True
        reading = asyncio.create_task(target.reader().read(target.source(source), refs, IDS[:6]))
        await CLOCK.sleep(0.1)
        assert target.staging.used_bytes == 2 * 2 * SIZE
        for _ in range(3):
            target.transport.let_through()
            await CLOCK.sleep(0.1)
        assert (await reading).bad == ()
        target.check_free()

    simulate(main())


@pytest.mark.parametrize("num_ticks", range(12))
def test_a_cancelled_read_frees_its_space(num_ticks: int) -> None:
    """It is cancelled after some turns of the event loop: before it has space, while transfers are
    under way, and while others have occupied the space."""

    async def main() -> None:
        source, target = two_pools(32)
        refs = await encoded(source, [LOSSLESS] * 8)
        others = target.staging.try_allocate(6 * SIZE)
        target.transport.holds = True
        remote, reader = target.source(source), target.reader()
        reading = asyncio.create_task(reader.read(remote, refs, IDS[:8]))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert others is not None and target.staging.used_bytes == others.size_bytes
        target.staging.release(others)
        target.check_free()
        target.transport.holds = False
        assert (await reader.read(remote, refs, IDS[:8])).bad == ()

    simulate(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_unfinished_transfers_keep_their_ranges_until_they_have_ended(is_cancelled: bool) -> None:
    async def main() -> None:
        source, target = two_pools(32)
        refs = await encoded(source, [LOSSLESS] * 8)
        target.transport.holds = target.transport.is_stuck = True
        reader = target.reader()
        reading = asyncio.create_task(reader.read(target.source(source), refs, IDS[:8]))
        await CLOCK.sleep(0.1)
        if is_cancelled:
            reading.cancel()
        else:
            for each in list(target.transport.held):
                each.state = "failed"  # type: ignore[assignment]
            target.transport.poll = lambda transfer: transfer.state  # type: ignore[method-assign]
        with pytest.raises(TransferFailed) as failure:
            await reading
        assert len(failure.value.unfinished_transfers) == 2
        for _ in range(2):
            reader.sweep()
            assert target.staging.used_bytes == 4 * SIZE
        target.transport.is_stuck = False
        reader.sweep()
        target.check_free()

    simulate(main())


def test_a_read_without_space_in_time_fails() -> None:
    async def main() -> None:
        source, target = two_pools()
        refs = await encoded(source, [LOSSLESS])
        others = target.staging.try_allocate(16 * SIZE)
        assert others is not None
        with pytest.raises(DeadlineExceeded, match="no space for 256 bytes within 1 s"):
            await target.reader().read(target.source(source), refs, IDS[:1])
        target.staging.release(others)
        target.check_free()

    simulate(main())


def test_a_failed_group_fails_the_read_and_starts_no_others() -> None:
    async def main() -> None:
        source, target = two_pools()
        refs = await encoded(source, [LOSSLESS] * 8)
        target.transport._fabric.fault = lambda endpoint, span: "lost"
        remote = target.source(source)
        with pytest.raises(TransferFailed, match="was lost") as failure:
            await target.reader().read(remote, refs, IDS[:8])
        assert failure.value.unfinished_transfers == ()
        assert target.transport.num_posted <= 3
        beyond = replace(refs[0], offset_bytes=1 << 30)
        with pytest.raises(Invalid, match="outside the remote region"):
            await target.reader().read(remote, [beyond], IDS[:1])
        target.check_free()

    simulate(main())


# -- what can be read ----------------------------------------------------------------------------


def test_accepted_codecs() -> None:
    _, pool = two_pools()
    assert pool.reader().accepted(exact=False) == (LOSSLESS, FP8, INT4, INT2)
    assert pool.reader().accepted(exact=True) == (LOSSLESS,)
    assert BlockReader(pool.layout, None, CODECS, CLOCK, 1.0).accepted(exact=False) == ()
    _, small = two_pools(staged_blocks=0)
    assert small.reader().accepted(exact=False) == ()


@pytest.mark.parametrize(
    ("codec", "size", "error"),
    [
        (NONE, SIZE, ""),
        (NONE, SIZE - 1, "a block of 255 bytes in codec none; such blocks have 256 bytes"),
        (LOSSLESS, SIZE, ""),
        (LOSSLESS, 0, "a block of 0 bytes in codec lossless; such blocks have 1 to 256 bytes"),
        (LOSSLESS, SIZE + 1, "such blocks have 1 to 256 bytes"),
        (INT4, 9, "a block in codec int4; this worker accepts lossless"),
    ],
)
def test_blocks_are_checked_before_they_are_read(codec: KvCodecName, size: int, error: str) -> None:
    reader = two_pools()[1].reader()
    block = BlockRef(0, size, 0, KEYS[0], codec)
    if not error:
        return reader.check([block], (LOSSLESS,))
    with pytest.raises(Corrupt, match=error):
        reader.check([block], (LOSSLESS,))
    return None
