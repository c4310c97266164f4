"""Runs batches of reads to completion in an event loop; they can be cancelled safely."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.errors import Invalid, Unavailable
from baton.transport.base import Peer, Transfer, TransferRange, TransferState, Transport

FIRST_POLL_SECONDS = 50e-6
LONGEST_POLL_SECONDS = 1e-3
RELEASE_TIMEOUT_SECONDS = 1.0
"""How long the release of a transfer may take before the transfer is reported as unfinished, with
unsafe local blocks."""

INLINE_BYTES = 1024 * 1024
"""Copying or checksumming less than this is cheaper than switching to a thread and back."""

MAX_CONCURRENT_GROUPS = 2
"""Groups in progress at a time: one is verified while the next one is read, and two cores copy
faster than one."""

VerifyBlocks = Callable[[int, int], Sequence[bool]]
"""Checks whether each block of [first, last) has the right content. Called off the event loop."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class VerifiedReadResult:
    """The result of :func:`read_and_verify`, after all blocks have arrived. The first
    ``num_verified`` blocks passed the verification. If that is not all of them, the next block
    failed it, and the later ones must not be used. ``size_bytes`` and ``seconds`` are those of the
    whole read; ``link_seconds`` is the part of them in which bytes were under way."""

    size_bytes: int
    seconds: float
    num_verified: int
    link_seconds: float


class TransferFailed(Unavailable):
    """The data did not arrive. ``unfinished_transfers`` may still write to the local blocks:
    quarantine the blocks until ``transport.release`` has returned True for each of these
    transfers."""

    def __init__(self, message: str, unfinished_transfers: Sequence[Transfer] = ()) -> None:
        super().__init__(message)
        self.unfinished_transfers = tuple(unfinished_transfers)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled. Call this after handling a
    TransferFailed that has unfinished transfers: that exception may have been raised in place of
    the task's CancelledError."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def read_ranges(
    transport: Transport,
    peer: Peer,
    ranges: Sequence[TransferRange],
    timeout_seconds: float,
    clock: Clock,
    release_timeout_seconds: float = RELEASE_TIMEOUT_SECONDS,
) -> ReadResult:
    """Read ``ranges`` from ``peer``. Raises TransferFailed, and Invalid for ranges outside the
    regions.

    A cancelled call raises CancelledError once nothing writes to the local blocks any more. If the
    transfer can't be released within ``release_timeout_seconds``, it raises TransferFailed with the
    unfinished transfers instead.
    """
    return await _transfer(
        transport, peer, ranges, timeout_seconds, clock, release_timeout_seconds, None
    )


async def read_and_verify(
    transport: Transport,
    peer: Peer,
    ranges: Sequence[TransferRange],
    verify_blocks: VerifyBlocks,
    timeout_seconds: float,
    clock: Clock,
    release_timeout_seconds: float = RELEASE_TIMEOUT_SECONDS,
) -> VerifiedReadResult:
    """Read one block per range, group by group, and verify each group as soon as it has arrived.
    ``timeout_seconds`` applies to each group. A block that fails the verification raises no error:
    see :class:`VerifiedReadResult`. Raises TransferFailed, and Invalid for ranges outside the
    regions.

    A cancelled call raises CancelledError once nothing writes to the local blocks any more. If a
    transfer can't be released within ``release_timeout_seconds``, it raises TransferFailed with the
    unfinished transfers instead.
    """
    began = clock.monotonic()
    waiting = deque(_groups(ranges, transport.capabilities().group_bytes))
    good = [False] * len(ranges)
    failures: list[TransferFailed] = []
    invalid: list[Invalid] = []
    on_link: list[tuple[float, float]] = []

    async def lane() -> None:
        while waiting and not failures and not invalid:
            first, last = waiting.popleft()
            group = ranges[first:last]
            after = partial(verify, first, last, clock.monotonic())
            try:
                await _transfer(
                    transport, peer, group, timeout_seconds, clock, release_timeout_seconds, after
                )
            except TransferFailed as error:
                failures.append(error)
            except Invalid as error:
                invalid.append(error)

    def verify(first: int, last: int, posted_at: float) -> None:
        on_link.append((posted_at, clock.monotonic()))
        good[first:last] = verify_blocks(first, last)

    try:
        await _run_concurrently(lane, min(MAX_CONCURRENT_GROUPS, len(waiting)))
    except (
        BaseException
    ):  # cancelled, or a bug in ``verify_blocks``: still report unfinished transfers
        if any(failure.unfinished_transfers for failure in failures):
            raise _combined(failures) from None
        raise
    if failures:
        raise _combined(failures)
    if invalid:
        raise invalid[0]
    num_good = good.index(False) if False in good else len(good)
    size = sum(span.size_bytes for span in ranges)
    seconds = clock.monotonic() - began
    return VerifiedReadResult(size, seconds, num_good, busy_seconds(on_link))


async def _run_concurrently(lane: Callable[[], Coroutine[Any, Any, None]], num_lanes: int) -> None:
    if num_lanes == 1:
        await lane()
        return
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_lanes):
            tasks.create_task(lane())


def _combined(failures: Sequence[TransferFailed]) -> TransferFailed:
    unfinished = [transfer for failure in failures for transfer in failure.unfinished_transfers]
    return TransferFailed(str(failures[0]), unfinished)


def _groups(spans: Sequence[TransferRange], group_bytes: int) -> list[tuple[int, int]]:
    """Divide the blocks into groups of at most ``group_bytes`` each, or of a single block that is
    larger. Return the groups as half-open ranges of indexes."""
    groups: list[tuple[int, int]] = []
    first, size = 0, 0
    for index, span in enumerate(spans):
        if size and size + span.size_bytes > group_bytes:
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
    """Run one transfer, and call ``after`` once all data has arrived. If a thread copied the data,
    ``after`` is called in that thread, since the data is in its core's cache."""
    began = clock.monotonic()
    batch = transport.prepare(peer, spans, timeout_seconds)

    def post_and_verify() -> None:
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
            post_and_verify()
        else:
            await run_in_thread(post_and_verify)
        await _wait_until_done(transport, batch, clock)
        state, error = transport.poll(batch), batch.error
    except asyncio.CancelledError:
        await _release(transport, peer, batch, clock, settle_seconds)
        raise
    await _release(transport, peer, batch, clock, settle_seconds)
    if state is not TransferState.DONE:
        raise TransferFailed(
            f"reading from {peer.endpoint.owner} over transport {transport.name} failed: {error}"
        )
    if after is not None:
        await run_in_thread(after)
    return ReadResult(batch.size_bytes, clock.monotonic() - began)


async def _wait_until_done(transport: Transport, batch: Transfer, clock: Clock) -> None:
    pause = FIRST_POLL_SECONDS
    while transport.poll(batch) is TransferState.PENDING:
        await clock.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)


async def _release(
    transport: Transport, peer: Peer, batch: Transfer, clock: Clock, settle_seconds: float
) -> None:
    """Release the transfer. Raises TransferFailed if it can't be released in time. If the
    task is cancelled meanwhile, it waits nevertheless: otherwise the caller wouldn't learn that the
    local blocks are unsafe."""
    began = clock.monotonic()
    cancelled: asyncio.CancelledError | None = None
    while not transport.release(batch):
        if clock.monotonic() - began >= settle_seconds:
            raise TransferFailed(
                f"transport {transport.name} can't release a read from {peer.endpoint.owner} "
                f"within {settle_seconds:g} s; it may still write to the local blocks",
                [batch],
            )
        try:
            await clock.sleep(LONGEST_POLL_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the reads was in progress. ``intervals`` are the times of the
    beginning and the end of each read."""
    seconds, busy_until = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        seconds += max(ended - max(began, busy_until), 0.0)
        busy_until = max(busy_until, ended)
    return seconds
