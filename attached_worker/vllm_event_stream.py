"""Follows the KV events of a server over ZMQ, without losing any of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import structlog
import zmq
import zmq.asyncio

from attached_worker.cached_blocks import CachedBlocks
from attached_worker.vllm_event_source import EventSource
from baton.clock import Clock
from baton.errors import Corrupt, Unavailable

CHECK_SECONDS = 5.0
"""Interval at which the server is asked whether events were missed, or it has restarted."""

REPLAY_SECONDS = 5.0
"""How long to wait for each message of a replay. A server replays between two of its steps."""

MAX_BATCH_BYTES = 64 << 20

TOO_OLD = "the server no longer has all events since its start: raise buffer_steps"

log = structlog.get_logger(__name__)


class EventStream:
    """Passes each batch of events to ``apply``, in order, and tells ``cached`` where they begin and
    when it has all of them."""

    def __init__(
        self,
        source: EventSource,
        clock: Clock,
        cached: CachedBlocks,
        apply: Callable[[bytes], None],
    ) -> None:
        self._source = source
        self._clock = clock
        self._cached = cached
        self._apply = apply
        self._context = zmq.asyncio.Context()
        self._next = 0
        """Number of the next batch. The server numbers them from 0."""

        self._last = b""
        """The batch before it. It has the time when it was made, so a server that has restarted has
        another one with this number."""

        self._has_all = True
        """Whether the server still had all batches since its start."""

    async def run(self) -> None:
        """Follow the events until cancelled. Raises Unavailable if the server does not respond or
        leaves out events, and the errors of ``apply``. Must be called only once."""
        try:
            await self._follow()
        except zmq.ZMQError as error:
            raise Unavailable(f"{self._source.events}: {error}") from error
        finally:
            self._cached.clear(is_complete=False)
            self._context.destroy(linger=0)

    async def _follow(self) -> None:
        subscription = self._socket(zmq.SUB, self._source.events)
        subscription.subscribe(b"")
        await self._catch_up()
        check_at = self._clock.monotonic() + CHECK_SECONDS
        while True:
            try:
                async with asyncio.timeout(check_at - self._clock.monotonic()):
                    number, payload = _numbered(await subscription.recv_multipart())
            except TimeoutError:
                await self._catch_up()
                check_at = self._clock.monotonic() + CHECK_SECONDS
                continue
            if number == self._next:
                self._advance(number, payload)
            elif number > self._next or number == 0:  # others have been replayed already
                await self._catch_up()
                if number > self._next:
                    raise Unavailable(f"batch {number} came, but batch {self._next} never")

    async def _catch_up(self) -> None:
        """Apply the batches that were missed."""
        before = None
        while not await self._apply_replay():
            if self._next == before:
                raise Unavailable(f"the replay leaves out batch {self._next}")
            before = self._next
        if self._has_all:
            self._cached.complete()

    async def _apply_replay(self) -> bool:
        """Apply what the server has after the last batch that is known. Return False if it must be
        asked again, because it has restarted, no longer has that batch, or left out some."""
        is_known = self._next == 0
        async with aclosing(self._replay(max(self._next - 1, 0))) as batches:
            async for number, payload in batches:
                if not is_known:
                    is_known = (number, payload) == (self._next - 1, self._last)
                    if not is_known:
                        break
                elif number == self._next:
                    self._advance(number, payload)
                elif self._next == 0:
                    self._has_all = False
                    log.warning("kv_events_unusable", reason=TOO_OLD)
                    self._advance(number, payload)
                else:
                    return False
        if not is_known:
            self._next, self._last, self._has_all = 0, b"", True
            self._cached.clear(is_complete=False)
        return is_known

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield the numbers and contents of the batches from number ``start`` on that the server
        still has. It leaves out some if its queue is full. Raises Unavailable."""
        socket = self._socket(zmq.DEALER, self._source.replay)
        try:
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_SECONDS):
                    number, payload = _numbered(await socket.recv_multipart())
                if number < 0:
                    return
                yield number, payload
        except TimeoutError as error:
            raise Unavailable(
                f"{self._source.replay} has not responded within {REPLAY_SECONDS:g} s"
            ) from error
        finally:
            socket.close(linger=0)

    def _advance(self, number: int, payload: bytes) -> None:
        self._apply(payload)
        self._next, self._last = number + 1, payload

    def _socket(self, kind: int, endpoint: str) -> "zmq.asyncio.Socket":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.connect(endpoint)
        return socket


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return a batch and its number, which is -1 at the end of a replay. Before them come a topic
    and, in a replay, an empty frame; vLLM 0.24 has no topic there. Raises Corrupt."""
    if len(frames) < 2:
        raise Corrupt(f"a message of KV events has {len(frames)} parts")
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
