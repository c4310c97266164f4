"""Batches of reads from beginning to end, in an event loop, safe to cancel."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.errors import Unavailable
from baton.transport.base import Peer, Transfer, TransferRange, TransferState, Transport

FIRST_POLL_SECONDS = 50e-6
LONGEST_POLL_SECONDS = 1e-3
RELEASE_TIMEOUT_SECONDS = 1.0
"""How long an ended transfer may take to let go of the local blocks before the caller is told
that they are unsafe."""

INLINE_BYTES = 1024 * 1024
"""To copy or to sum fewer takes less than the way to a thread and back."""

GROUP_BYTES = 4 * 1024 * 1024
MAX_CONCURRENT_GROUPS = 2
"""Groups under way at a time: one is checked while the next one is read, and two cores copy
faster than one."""

VerifyBlocks = Callable[[int, int], Sequence[bool]]
"""Whether each block of [first, last) holds what it should. Called off the event loop."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class VerifiedReadResult:
    """``num_good`` leading blocks hold what they should."""

    size_bytes: int
    seconds: float
    num_good: int


class TransferFailed(Unavailable):
    """The bytes did not arrive. The transfers of ``strays`` may still write to the local blocks:
    quarantine them until ``transport.release(stray)`` says True for each."""

    def __init__(self, message: str, strays: Sequence[Transfer] = ()) -> None:
        super().__init__(message)
        self.strays = tuple(strays)


def raise_if_cancelled() -> None:
    """A stray hides that its caller was cancelled: whoever would go on after one asks here."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def read_ranges(
    transport: Transport,
    peer: Peer,
    spans: Sequence[TransferRange],
    timeout_seconds: float,
    clock: Clock,
    settle_seconds: float = RELEASE_TIMEOUT_SECONDS,
) -> ReadResult:
    """Reads ``spans`` from ``peer``. Raises TransferFailed; Invalid for spans out of range.

    Cancelled, it returns once nothing writes to the local blocks any more, or raises
    TransferFailed with a stray.
    """
    return await _transfer(transport, peer, spans, timeout_seconds, clock, settle_seconds, None)


async def read_and_verify(
    transport: Transport,
    peer: Peer,
    spans: Sequence[TransferRange],
    check: VerifyBlocks,
    timeout_seconds: float,
    clock: Clock,
    settle_seconds: float = RELEASE_TIMEOUT_SECONDS,
) -> VerifiedReadResult:
    """Reads one block per span, group by group, and checks each group as soon as it is there.

    Raises and is cancelled as :func:`read_ranges`; the deadline is that of each group.
    """
    began = clock.monotonic()
    waiting = deque(_groups(spans))
    good = [False] * len(spans)
    failures: list[TransferFailed] = []

    async def lane() -> None:
        while waiting and not failures:
            first, last = waiting.popleft()
            group = spans[first:last]
            look = partial(note, first, last)
            try:
                await _transfer(
                    transport, peer, group, timeout_seconds, clock, settle_seconds, look
                )
            except TransferFailed as error:
                failures.append(error)

    def note(first: int, last: int) -> None:
        good[first:last] = check(first, last)

    try:
        await _side_by_side(lane, min(MAX_CONCURRENT_GROUPS, len(waiting)))
    except BaseException:  # cancelled, or a bug in ``check``: nothing may hide a stray
        if any(failure.strays for failure in failures):
            raise _joined(failures) from None
        raise
    if failures:
        raise _joined(failures)
    num_good = good.index(False) if False in good else len(good)
    size = sum(span.size_bytes for span in spans)
    return VerifiedReadResult(size, clock.monotonic() - began, num_good)


async def _side_by_side(lane: Callable[[], Coroutine[Any, Any, None]], num_lanes: int) -> None:
    if num_lanes == 1:
        await lane()
        return
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_lanes):
            tasks.create_task(lane())


def _joined(failures: Sequence[TransferFailed]) -> TransferFailed:
    strays = [stray for failure in failures for stray in failure.strays]
    return TransferFailed(str(failures[0]), strays)


def _groups(spans: Sequence[TransferRange]) -> list[tuple[int, int]]:
    """Half-open ranges of at most GROUP_BYTES, or of one span."""
    groups: list[tuple[int, int]] = []
    first, size = 0, 0
    for index, span in enumerate(spans):
        if size and size + span.size_bytes > GROUP_BYTES:
            groups.append((first, index))
            first, size = index, 0
        size += span.size_bytes
    return [*groups, (first, len(spans))]


async def _transfer(
    transport: Transport,
    peer: Peer,
    spans: Sequence[TransferRange],
    timeout_seconds: float,
    clock: Clock,
    settle_seconds: float,
    after: Callable[[], None] | None,
) -> ReadResult:
    """Calls ``after`` once everything has arrived: in the thread that copied, if one did, since
    what it looks at is in that core's cache."""
    began = clock.monotonic()
    batch = transport.prepare(peer, spans, timeout_seconds)

    def post_and_look() -> None:
        nonlocal after
        transport.post(batch)
        if after is not None and transport.poll(batch) is TransferState.DONE:
            after()
            after = None

    try:
        can = transport.capabilities()
        if not can.copies_in_post:
            transport.post(batch)
        elif can.local_only and not can.waits_in_post and batch.size_bytes <= INLINE_BYTES:
            post_and_look()
        else:
            await run_in_thread(post_and_look)
        await _arrival(transport, batch, clock)
        state, error = transport.poll(batch), batch.error
    except asyncio.CancelledError:
        await _let_go(transport, batch, clock, settle_seconds)
        raise
    await _let_go(transport, batch, clock, settle_seconds)
    if state is not TransferState.DONE:
        raise TransferFailed(f"{transport.name} read from {peer.endpoint.owner}: {error}")
    if after is not None:
        await run_in_thread(after)
    return ReadResult(batch.size_bytes, clock.monotonic() - began)


async def _arrival(transport: Transport, batch: Transfer, clock: Clock) -> None:
    pause = FIRST_POLL_SECONDS
    while transport.poll(batch) is TransferState.PENDING:
        await clock.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)


async def _let_go(
    transport: Transport, batch: Transfer, clock: Clock, settle_seconds: float
) -> None:
    """Raises TransferFailed if it can't be ended. Whoever is cancelled here (once more, maybe)
    still waits: nobody else would learn that the local blocks are unsafe."""
    began = clock.monotonic()
    cancelled: asyncio.CancelledError | None = None
    while not transport.release(batch):
        if clock.monotonic() - began >= settle_seconds:
            raise TransferFailed(f"{transport.name} can't end a read", [batch])
        try:
            await clock.sleep(LONGEST_POLL_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
