"""Reads the chunks of a KV transfer as they are announced, and acknowledges them to the source."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from baton.clock import Clock
from baton.core.ids import BlockId
from baton.core.kv_transfer import BlockRef, KvTransferChunk, KvTransferDone, KvTransferEvent
from baton.errors import BatonError, Corrupt, Invalid, Unavailable
from baton.rpc.worker_client import KvImportStream
from baton.transport.reads import TransferFailed
from baton.worker.block_reader import BlockReader
from decode_worker.import_state import KvImport

READ_ATTEMPTS = 2
"""Maximum number of attempts to read a chunk. If the last attempt fails or its data is damaged, the
import fails and the request is placed again."""


class ChunkReader:
    """Reads the chunks of one import, for which blocks are reserved, from ``stream``'s source. Two
    chunks are under way at most: the next is read while the last blocks of one are decoded. A chunk
    is acknowledged once all blocks up to its end are read and verified."""

    def __init__(
        self,
        kv_import: KvImport,
        stream: KvImportStream,
        reader: BlockReader,
        clock: Clock,
    ) -> None:
        assert kv_import.reservation is not None and kv_import.source is not None
        self._import = kv_import
        self._block_ids = kv_import.reservation.block_ids
        self._source = kv_import.source
        self._stream = stream
        self._reader = reader
        self._clock = clock
        self._num_announced = kv_import.num_read_blocks

    async def read_all(self) -> KvTransferDone:
        """Read all chunks until the source is done, and return its last event. Raises Corrupt if
        the source violates the protocol or blocks arrive damaged, and Unavailable or
        DeadlineExceeded. Nothing is read any more afterwards, except by the import's unfinished
        transfers."""
        failure: BatonError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                reading: asyncio.Task[None] | None = None
                while not isinstance(event := await self._stream.next_event(), KvTransferDone):
                    chunk, previous = self._checked(event), reading
                    reading = tasks.create_task(self._read_chunk(chunk, previous))
                    if previous is not None:
                        await asyncio.wait([previous])
        except* BatonError as group:
            failure = group.exceptions[0]  # type: ignore[assignment]
        if failure is not None:
            raise failure
        assert isinstance(event, KvTransferDone)
        return event

    def _checked(self, event: KvTransferEvent) -> KvTransferChunk:
        """Return a chunk without the blocks that were announced before or are cached. Raises
        Corrupt if it is no chunk that may follow now."""
        if not isinstance(event, KvTransferChunk):
            raise Corrupt(f"the source sent an unexpected {type(event).__name__} in a KV transfer")
        self._import.stats.last_chunk_at = self._clock.monotonic()
        first, end = event.first_block, event.first_block + len(event.blocks)
        fits = 0 <= first < end <= len(self._block_ids)
        if not fits or first > self._num_announced:
            raise Corrupt(
                f"the source announced blocks [{first}, {end}); they must follow the first "
                f"{self._num_announced} and be within the request's {len(self._block_ids)} blocks"
            )
        start = min(self._num_announced, end)
        self._num_announced = max(self._num_announced, end)
        blocks = event.blocks[start - first :]
        self._reader.check(blocks, self._import.accepted_codecs)
        return KvTransferChunk(start, blocks)

    async def _read_chunk(
        self, chunk: KvTransferChunk, previous: "asyncio.Task[None] | None"
    ) -> None:
        """Read the chunk's blocks; then acknowledge it, after the ``previous`` chunk."""
        end = chunk.first_block + len(chunk.blocks)
        if chunk.blocks:
            block_ids = self._block_ids[chunk.first_block : end]
            await _read_while_exported(self._stream, self._read_blocks(chunk.blocks, block_ids))
        if previous is not None:
            await previous
        self._import.num_read_blocks = max(self._import.num_read_blocks, end)
        await self._acknowledge(end)

    async def _acknowledge(self, num_blocks: int) -> None:
        """Tell the source that the first ``num_blocks`` blocks are read. Raises Unavailable if the
        stream has ended and blocks are missing. The source ends it upon the last acknowledgement,
        which gRPC may then report as not sent."""
        try:
            await self._stream.acknowledge(num_blocks)
        except Unavailable:
            if self._import.num_read_blocks < len(self._block_ids):
                raise

    async def _read_blocks(self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId]) -> None:
        """Read and verify blocks. Raises Corrupt or Unavailable after the last attempt."""
        for attempt in range(READ_ATTEMPTS):
            try:
                bad = await self._read_once(blocks, block_ids)
                if not bad:
                    return
                blocks = [blocks[index] for index in bad]
                block_ids = [block_ids[index] for index in bad]
            except Unavailable:
                if attempt + 1 == READ_ATTEMPTS or self._import.unfinished_transfers:
                    raise
        transport = self._source.transport.name
        raise Corrupt(f"blocks arrived damaged over transport {transport}")

    async def _read_once(
        self, blocks: Sequence[BlockRef], block_ids: Sequence[BlockId]
    ) -> tuple[int, ...]:
        """Read the blocks once. Return the indexes of those that must be read again, because they
        or blocks before them do not match the checksums that the source announced."""
        try:
            read = await self._reader.read(self._source, blocks, block_ids)
        except TransferFailed as error:
            self._import.unfinished_transfers += error.unfinished_transfers
            raise
        except Invalid as error:  # the source announced blocks outside of its memory
            owner = self._source.peer.endpoint.owner
            raise Corrupt(f"source {owner} announced invalid blocks: {error}") from error
        self._import.stats.record_read(blocks, self._reader.block_bytes, read.times)
        return read.bad


async def _read_while_exported(stream: KvImportStream, reading: Coroutine[Any, Any, None]) -> None:
    """Run ``reading``. If the source ends its event stream meanwhile, cancel ``reading`` and raise
    Unavailable: a read from a source that is gone might otherwise last until its timeout."""

    async def watch() -> None:
        await stream.ended()
        raise Unavailable("the prefill worker ended the KV transfer early")

    failure: BatonError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            await reading
            watching.cancel()
    except* BatonError as group:
        failure = group.exceptions[0]  # type: ignore[assignment]
    if failure is not None:
        raise failure
