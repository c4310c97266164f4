"""The source's side of a hand-off: blocks of one request, pinned until they were read."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from baton.core.ids import BlockId, BlockKey, TokenId
from baton.core.kv_transfer import (
    BlockRef,
    Endpoint,
    KvTransferChunk,
    KvTransferDone,
    KvTransferEvent,
    KvTransferScheduled,
)
from baton.engine.engine import PrefillProgress
from baton.errors import Unavailable
from baton.worker.kv_layout import KvLayout


class KvExport:
    """Grows while the prompt is computed, and ends when its reader has read everything,
    leaves, or the request is cancelled. ``on_close(complete)`` is called once. The reader is
    asked to make room when ``late_tokens`` of the prompt are left: that is time enough to read
    what was computed before, and a long prompt does not hold memory twice for seconds.

    At most one reader: a second one gets Unavailable, since the first holds the lease.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_tokens: int,
        block_tokens: int,
        late_tokens: int,
        on_close: Callable[[bool], None],
    ) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._block_tokens = block_tokens
        self._late_tokens = late_tokens
        self._on_close = on_close
        self._changed = asyncio.Event()
        self._endpoint: Endpoint | None = None
        self._nearly_done = False
        self._num_ready = 0
        self._num_acknowledged = 0
        self._block_ids: tuple[BlockId, ...] = ()
        self._keys: tuple[BlockKey, ...] = ()
        self._refs: list[BlockRef] = []
        self._done: KvTransferDone | None = None
        self._closed = False

    @property
    def has_reader(self) -> bool:
        return self._endpoint is not None

    @property
    def complete(self) -> bool:
        """Everything was computed, read and acknowledged."""
        return self._done is not None and (
            self._done.finished or self._num_acknowledged >= len(self._block_ids)
        )

    def advance(self, progress: PrefillProgress) -> None:
        """A step computed more of the prompt."""
        self._nearly_done = progress.num_computed_tokens + self._late_tokens >= self._num_tokens
        self._block_ids = tuple(progress.block_ids)
        self._keys = tuple(progress.keys)
        if progress.num_computed_tokens >= self._num_tokens:
            self._num_ready = len(self._block_ids)
        else:
            self._num_ready = progress.num_computed_tokens // self._block_tokens
        self._changed.set()

    def finish(self, token_id: TokenId, finished: bool) -> None:
        """The prompt is computed; ``token_id`` follows it."""
        self._done = KvTransferDone(token_id, finished)
        self._changed.set()

    def attach(self, endpoint: Endpoint) -> None:
        """A reader has come, and will read over ``endpoint``."""
        if self._endpoint is not None or self._closed:
            raise Unavailable("the request's blocks have a reader already")
        self._endpoint = endpoint

    def acknowledge(self, num_blocks: int) -> None:
        """The reader has the first ``num_blocks``; what it was not told of, it can't have."""
        told = min(num_blocks, len(self._refs))
        self._num_acknowledged = max(self._num_acknowledged, told)
        self._changed.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close(self.complete)

    async def events(self) -> AsyncGenerator[KvTransferEvent]:
        """What the reader is told, in order; ends when the last acknowledgement is in."""
        assert self._endpoint is not None, "attach() comes first"
        await self._until(lambda: self._nearly_done)
        yield KvTransferScheduled(self._endpoint, self._num_tokens, self._layout.checksum_algorithm)
        while self._done is None or len(self._refs) < len(self._block_ids):
            await self._until(lambda: self._num_ready > len(self._refs) or self._done is not None)
            if self._num_ready > len(self._refs):
                yield await self._next_chunk()
        yield self._done
        await self._until(lambda: self.complete)

    async def _next_chunk(self) -> KvTransferChunk:
        start, end = len(self._refs), self._num_ready
        refs = await self._layout.refs(self._block_ids[start:end], self._keys[start:end])
        self._refs.extend(refs)
        return KvTransferChunk(start, refs)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._closed:
                raise Unavailable("the prefill worker gave up the request")
            self._changed.clear()
            await self._changed.wait()


class LocalKvExportStream:
    """What a reader's stream holds on to."""

    def __init__(self, hold: KvExport) -> None:
        self.events = hold.events
        self.acknowledge = hold.acknowledge
        self.close = hold.close
