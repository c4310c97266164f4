"""The source side of a KV transfer: the blocks of one request, pinned until they have been read."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from baton.core.ids import BlockId, BlockKey, TokenId
from baton.core.kv_transfer import (
    Endpoint,
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferScheduled,
)
from baton.engine.engine import PrefillProgress
from baton.engine.kv_window import KvWindow
from baton.errors import DeadlineExceeded, Unavailable
from baton.worker.kv_layout import KvLayout
from prefill_worker.export_encoder import ExportEncoder

CHUNK_TIMEOUT_SECONDS = 120.0
"""Time limit for the checksums and the encoding of one chunk. They take milliseconds, unless the
device hangs. The importing worker would then wait for ever, since it can't know how long a prefill
takes."""


class KvExport:
    """Exports the KV of one request to the worker that imports it (the reader).

    It grows while the prompt is prefilled. It ends when the reader has read everything or
    disconnects, or when the request is cancelled; ``on_close(complete)`` is then called once.

    The reader is told to reserve blocks when ``reserve_ahead_tokens`` of the prompt are left to
    compute. That leaves enough time to read the earlier blocks, but a long prompt does not occupy
    memory on both workers for seconds.

    The blocks of the request's table that no later token reads, because their layers have sliding
    windows or the request has an attention window, are left out: the exported blocks are all
    others, in the order of the table.

    With a :class:`ExportEncoder`, blocks are encoded before they are announced, a chunk at a time.

    There is at most one reader; :meth:`attach_reader` raises Unavailable for a second one.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_tokens: int,
        window: KvWindow,
        reserve_ahead_tokens: int,
        on_close: Callable[[bool], None],
    ) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._window = window
        self._first_span = window.first_span(num_tokens)
        self._reserve_ahead_tokens = reserve_ahead_tokens
        self._on_close = on_close
        self._changed = asyncio.Event()
        self._endpoint: Endpoint | None = None
        self._nearly_done = False
        self._num_ready = 0
        self._num_announced = 0
        self._num_acknowledged = 0
        self._block_ids: tuple[BlockId, ...] = ()
        self._keys: tuple[BlockKey, ...] = ()
        self._spans: tuple[int, ...] = ()
        self._encoder: ExportEncoder | None = None
        self._done: KvTransferDone | None = None
        self._closed = False

    @property
    def has_reader(self) -> bool:
        return self._endpoint is not None

    @property
    def is_complete(self) -> bool:
        """Whether all blocks were computed, read and acknowledged, or need not be read because the
        answer ended with its first token. In the latter case the export still stays open until its
        reader has disconnected, because a read may be in progress."""
        return self._done is not None and (
            self._done.is_finished or self._num_acknowledged >= len(self._block_ids)
        )

    def record_progress(self, progress: PrefillProgress) -> None:
        """Record how much of the prompt is computed after a step."""
        self._nearly_done = (
            progress.num_computed_tokens + self._reserve_ahead_tokens >= self._num_tokens
        )
        window, table, keys = self._window, progress.block_ids, progress.sealed_keys
        indexes = window.read_indexes(range(len(table)), self._first_span)
        self._block_ids = tuple(table[index] for index in indexes)
        self._spans = tuple(index // window.num_groups for index in indexes)
        self._keys = tuple(keys[index] for index in indexes if index < len(keys))
        if progress.num_computed_tokens >= self._num_tokens:
            self._num_ready = len(self._block_ids)
        else:
            num_full_spans = progress.num_computed_tokens // window.block_tokens
            self._num_ready = window.num_read(num_full_spans, self._first_span)
        self._changed.set()

    def finish_prefill(self, token_id: TokenId, finished: bool) -> None:
        """Record that all KV is computed. ``token_id`` is the answer's next token: the first one,
        unless the answer migrates. If ``finished`` is set, the answer ended with that token, and
        the export closes: at once if it has no reader, otherwise when the reader disconnects."""
        self._done = KvTransferDone(token_id, finished)
        self._changed.set()
        if finished and not self.has_reader:
            self.close()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def attach_reader(self, endpoint: Endpoint, encoder: ExportEncoder | None = None) -> None:
        """Attach the reader, which will read over ``endpoint`` what ``encoder`` makes of the
        blocks; without one, they are read as they are. Raises Unavailable if there is already a
        reader, or if the export is closed."""
        if self._closed:
            raise Unavailable("the export of the request's KV has ended")
        if self._endpoint is not None:
            raise Unavailable("another worker is already importing the request's KV")
        self._endpoint = endpoint
        self._encoder = encoder

    def acknowledge(self, num_blocks: int) -> None:
        """Record that the reader has the first ``num_blocks`` blocks. If fewer blocks were
        announced to it, only those count."""
        acknowledged = min(num_blocks, self._num_announced)
        self._num_acknowledged = max(self._num_acknowledged, acknowledged)
        if self._encoder is not None:
            self._encoder.acknowledge(self._num_acknowledged)
        self._changed.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._changed.set()
            if self._encoder is not None:
                self._encoder.close()
            self._on_close(self.is_complete)

    async def events(self) -> AsyncGenerator[KvTransferEvent]:
        """Yield the events for the reader, in order; end after the last acknowledgement. If the
        answer ended with its first token, no KV is needed any more, and the blocks that had not
        been announced by then never are."""
        assert self._endpoint is not None, "call attach_reader() first"
        await self._wait_until(lambda: self._nearly_done)
        yield KvTransferScheduled(self._endpoint, self._num_tokens, self._layout.checksum_algorithm)
        while not self._all_announced():
            if self._num_ready > self._num_announced:
                yield await self._next_chunk()
            else:
                await self._wait_until(
                    lambda: self._num_ready > self._num_announced or self._done is not None
                )
        assert self._done is not None
        yield self._done
        await self._wait_until(lambda: self._num_acknowledged >= self._num_announced)

    def _all_announced(self) -> bool:
        """Whether nothing but KvTransferDone is left to be sent."""
        if self._done is None:
            return False
        return self._done.is_finished or self._num_announced >= len(self._block_ids)

    async def _next_chunk(self) -> KvTransferChunk:
        start, end = self._num_announced, self._num_ready
        block_ids, keys = self._block_ids[start:end], self._keys[start:end]
        try:
            async with asyncio.timeout(CHUNK_TIMEOUT_SECONDS):
                if self._encoder is None:
                    refs = await self._layout.block_refs(block_ids, keys)
                else:
                    refs = await self._encoder.block_refs(block_ids, keys, self._spans[start:end])
        except TimeoutError as error:
            message = f"the prefill worker did not export blocks within {CHUNK_TIMEOUT_SECONDS:g} s"
            raise DeadlineExceeded(message) from error
        self._num_announced = start + len(refs)
        return KvTransferChunk(start, refs)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._closed:
                raise Unavailable("the prefill worker aborted the request")
            self._changed.clear()
            await self._changed.wait()


class LocalKvExportStream:
    """The part of a :class:`KvExport` that the reader's event stream uses."""

    def __init__(self, kv_export: KvExport) -> None:
        self.events = kv_export.events
        self.acknowledge = kv_export.acknowledge
        self.close = kv_export.close
