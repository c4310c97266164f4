"""One batch of reads from beginning to end, in an event loop, safe to cancel."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import Unavailable
from baton.transport.base import Peer, Span, Transfer, TransferState, Transport

FIRST_POLL_SECONDS = 50e-6
LONGEST_POLL_SECONDS = 1e-3
SETTLE_SECONDS = 1.0
"""How long an ended transfer may take to let go of the local blocks before the caller is told
that they are unsafe."""


@dataclass(frozen=True, slots=True)
class Moved:
    size_bytes: int
    seconds: float


class TransferFailed(Unavailable):
    """The bytes did not arrive. With ``stray``, the transfer may still write to the local
    blocks: quarantine them until ``transport.release(stray)`` says True."""

    def __init__(self, message: str, stray: Transfer | None = None) -> None:
        super().__init__(message)
        self.stray = stray


async def transfer(
    transport: Transport, peer: Peer, spans: Sequence[Span], timeout_seconds: float, clock: Clock
) -> Moved:
    """Reads ``spans`` from ``peer``. Raises TransferFailed; Invalid for spans out of range.

    Cancelled, it returns once nothing writes to the local blocks any more, or raises
    TransferFailed with a stray.
    """
    began = clock.monotonic()
    batch = transport.prepare(peer, spans, timeout_seconds)
    try:
        if transport.capabilities().copies_in_post:
            await _post_in_thread(transport, batch)
        else:
            transport.post(batch)
        await _arrival(transport, batch, clock)
        state, error = transport.poll(batch), batch.error
    except asyncio.CancelledError:
        await _let_go(transport, batch, clock)
        raise
    await _let_go(transport, batch, clock)
    if state is not TransferState.DONE:
        raise TransferFailed(f"{transport.name} read from {peer.endpoint.owner}: {error}")
    return Moved(batch.size_bytes, clock.monotonic() - began)


async def _arrival(transport: Transport, batch: Transfer, clock: Clock) -> None:
    pause = FIRST_POLL_SECONDS
    while transport.poll(batch) is TransferState.PENDING:
        await clock.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)


async def _post_in_thread(transport: Transport, batch: Transfer) -> None:
    """A thread can't be interrupted, so a cancelled caller waits for its end."""
    copying = asyncio.get_running_loop().run_in_executor(None, transport.post, batch)
    cancelled: asyncio.CancelledError | None = None
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError as error:
            cancelled = error
    copying.result()
    if cancelled is not None:
        raise cancelled


async def _let_go(transport: Transport, batch: Transfer, clock: Clock) -> None:
    began = clock.monotonic()
    while not transport.release(batch):
        if clock.monotonic() - began > SETTLE_SECONDS:
            raise TransferFailed(f"{transport.name} can't end a read", stray=batch)
        await clock.sleep(LONGEST_POLL_SECONDS)
