"""Tests how the chunks of a KV transfer are read: the next one is read while the last one is not
finished, and they are acknowledged in order."""

import asyncio
import math
from collections.abc import Callable

import pytest

from baton.core.ids import TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import KvTransferChunk, KvTransferDone, KvTransferEvent
from baton.engine.engine import Reservation
from baton.errors import BatonError, Corrupt, Unavailable
from decode_worker.chunk_reader import ChunkReader
from decode_worker.import_state import KvImport
from tests.sim.virtual_time import simulate
from tests.staged_pool import CLOCK, IDS, KEYS, SIZE, two_pools

DONE = KvTransferDone(TokenId(1), False)
LOSSLESS = KvCodecName.LOSSLESS


class Source:
    """The source's side of a transfer: it sends events when told to."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[KvTransferEvent | BatonError] = asyncio.Queue()
        self.acknowledged: list[int] = []
        self.fails_from = math.inf
        """An acknowledgement of this many blocks or more can't be sent."""
        self.over = asyncio.Event()

    async def next_event(self) -> KvTransferEvent:
        event = await self.events.get()
        if isinstance(event, BatonError):
            raise event
        return event

    async def acknowledge(self, num_blocks: int) -> None:
        if num_blocks >= self.fails_from:
            raise Unavailable("the gRPC call ended before a message could be sent")
        self.acknowledged.append(num_blocks)

    async def ended(self) -> None:
        await self.over.wait()


class Transfer:
    """A transfer of 12 blocks into a pool whose first ``num_cached`` blocks are cached, in chunks
    of two blocks, which are groups, too."""

    def __init__(self, num_cached: int = 0) -> None:
        self.pool, self.target = two_pools(64)
        self.source = Source()
        self.state = KvImport(
            reservation=Reservation(tuple(IDS[:12]), num_cached),
            source=self.target.source(self.pool),
            num_read_blocks=num_cached,
        )
        reader = self.target.reader()
        self.state.accepted_codecs = reader.accepted(exact=False)
        chunks = ChunkReader(self.state, self.source, reader, CLOCK)
        self.reading = asyncio.create_task(chunks.read_all())

    async def announce(self, first: int, last: int, codec: KvCodecName = LOSSLESS) -> None:
        blocks = slice(first, last)
        staged = await self.pool.encoder().encode(
            IDS[blocks], KEYS[blocks], [codec] * (last - first)
        )
        assert len(staged.refs) == last - first
        self.source.events.put_nowait(KvTransferChunk(first, staged.refs))

    def check_blocks(self) -> None:
        assert all(self.pool.block(n) == self.target.block(n) for n in range(12))
        self.target.check_free()


@pytest.mark.parametrize("codec", [KvCodecName.NONE, LOSSLESS])
def test_two_chunks_are_read_at_once_and_acknowledged_in_order(codec: KvCodecName) -> None:
    async def main() -> None:
        transfer = Transfer()
        held, acknowledged = transfer.target.transport.held, transfer.source.acknowledged
        transfer.target.transport.holds = True
        for first in range(0, 12, 2):
            await transfer.announce(first, first + 2, codec)
        transfer.source.events.put_nowait(DONE)
        await CLOCK.sleep(0.1)
        assert len(held) == 2 and transfer.source.events.qsize() == 5
        transfer.target.transport.let_through(1)  # the second chunk arrives first
        await CLOCK.sleep(0.1)
        assert (len(held), acknowledged) == (1, [])
        for _ in range(5):
            transfer.target.transport.let_through()
            await CLOCK.sleep(0.1)
        assert acknowledged == [2, 4, 6, 8, 10, 12]
        assert await transfer.reading == DONE
        transfer.check_blocks()
        stats = transfer.state.stats
        assert stats.raw_bytes == 12 * SIZE
        assert stats.link_seconds == pytest.approx(0.6, abs=0.02)

    simulate(main())


def test_cached_and_repeated_blocks_are_only_acknowledged() -> None:
    async def main() -> None:
        transfer = Transfer(num_cached=3)
        for first, last in ((0, 2), (2, 6), (4, 8), (8, 12), (0, 2)):
            await transfer.announce(first, last)
        transfer.source.events.put_nowait(DONE)
        await transfer.reading
        assert transfer.source.acknowledged == [2, 6, 8, 12, 2]
        assert transfer.state.num_read_blocks == 12
        assert transfer.state.stats.raw_bytes == 9 * SIZE
        transfer.target.check_free()

    simulate(main())


def test_a_damaged_chunk_is_read_again_before_the_next_is_acknowledged() -> None:
    async def main() -> None:
        transfer = Transfer()
        num_reads = 0

        def damage_first(endpoint: object, span: object) -> str:
            nonlocal num_reads
            num_reads += 1
            return "corrupt" if num_reads == 1 else ""

        transfer.target.transport._fabric.fault = damage_first
        for first in range(0, 12, 2):
            await transfer.announce(first, first + 2)
        transfer.source.events.put_nowait(DONE)
        await transfer.reading
        assert transfer.source.acknowledged == [2, 4, 6, 8, 10, 12]
        assert num_reads > 6
        transfer.check_blocks()

    simulate(main())


def test_only_the_last_acknowledgement_may_fail() -> None:
    async def main(fails_from: int) -> KvTransferEvent:
        transfer = Transfer()
        transfer.source.fails_from = fails_from
        for first in range(0, 12, 2):
            await transfer.announce(first, first + 2)
        transfer.source.events.put_nowait(DONE)
        return await transfer.reading

    assert simulate(main(fails_from=12)) == DONE
    with pytest.raises(Unavailable, match="before a message could be sent"):
        simulate(main(fails_from=10))


def lose_all(transfer: Transfer) -> None:
    transfer.target.transport._fabric.fault = lambda endpoint, span: "lost"
    for _ in range(2):
        transfer.target.transport.let_through()


def damage_all(transfer: Transfer) -> None:
    transfer.target.transport.holds = False
    transfer.target.transport._fabric.fault = lambda endpoint, span: "corrupt"
    for _ in range(2):
        transfer.target.transport.let_through()


def end_stream(transfer: Transfer) -> None:
    transfer.source.over.set()


def end_events(transfer: Transfer) -> None:
    transfer.source.events.put_nowait(Unavailable("the source is gone"))
    transfer.target.transport.let_through()


def skip_blocks(transfer: Transfer) -> None:
    transfer.source.events.put_nowait(KvTransferChunk(8, ()))
    transfer.target.transport.let_through()


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (lose_all, Unavailable, "lost|can't release|failed"),
        (damage_all, Corrupt, "arrived damaged over transport memory"),
        (end_stream, Unavailable, "ended the KV transfer early"),
        (end_events, Unavailable, "the source is gone"),
        (skip_blocks, Corrupt, r"blocks \[8, 8\); they must follow the first 4"),
    ],
)
def test_a_failure_ends_both_reads_and_frees_their_space(
    fail: Callable[[Transfer], None], error: type[BatonError], message: str
) -> None:
    async def main() -> None:
        transfer = Transfer()
        transfer.target.transport.holds = True
        for first in (0, 2):
            await transfer.announce(first, first + 2)
        await CLOCK.sleep(0.1)
        assert len(transfer.target.transport.held) == 2
        fail(transfer)
        await CLOCK.sleep(0.1)
        transfer.target.transport.holds = False
        while transfer.target.transport.held:
            transfer.target.transport.let_through()
        with pytest.raises(error, match=message):
            await transfer.reading
        assert transfer.state.unfinished_transfers == ()
        transfer.target.check_free()

    simulate(main())


@pytest.mark.parametrize("num_ticks", range(0, 40, 3))
@pytest.mark.parametrize("holds", [True, False])
def test_a_cancelled_transfer_frees_its_space(num_ticks: int, holds: bool) -> None:
    async def main() -> None:
        transfer = Transfer()
        transfer.target.transport.holds = holds
        for first in range(0, 10, 2):
            await transfer.announce(first, first + 2)
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        transfer.reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer.reading
        transfer.target.check_free()
        assert transfer.source.acknowledged == sorted(transfer.source.acknowledged)

    simulate(main())


def test_unfinished_transfers_of_both_chunks_are_reported() -> None:
    async def main() -> None:
        transfer = Transfer()
        transfer.target.transport.holds = transfer.target.transport.is_stuck = True
        for first in (0, 2):
            await transfer.announce(first, first + 2)
        await CLOCK.sleep(0.1)
        transfer.reading.cancel()
        with pytest.raises((asyncio.CancelledError, Unavailable)):
            await transfer.reading
        assert len(transfer.state.unfinished_transfers) == 2
        assert transfer.target.staging.used_bytes == 4 * SIZE

    simulate(main())
