"""Tests how ranges of KV are read if a transfer can't be aborted, and if the caller is cancelled
more than once."""

import asyncio

import pytest

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid
from baton.transport.base import GROUP_BYTES, Region, TransferRange, TransferState
from baton.transport.reads import (
    TransferFailed,
    VerifiedReadResult,
    read_and_verify,
    read_ranges,
)
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from tests.sim.virtual_time import LoopClock, simulate

CLOCK = LoopClock()


class Stubborn(MemoryTransport):
    """A transport whose transfers can't be released before ``ends_at``."""

    ends_at = 0.0

    def post(self, transfer: object) -> None:
        """Start nothing: the transfer never completes by itself."""

    def poll(self, transfer: object) -> TransferState:
        return TransferState.PENDING

    def release(self, transfer: object) -> bool:
        return CLOCK.monotonic() >= self.ends_at


async def read_and_cancel_twice(ends_at: float) -> float:
    """Cancel a read twice. Return the time at which it ended, or raise its error if it failed."""
    memory = bytearray(64)
    transport = Stubborn(MemoryFabric(), "reader", 1, CLOCK)
    transport.register(Region(0, len(memory)))
    transport.ends_at = ends_at
    peer = transport.connect(Endpoint("memory", "reader", 1, "here", len(memory), b""))
    reading = asyncio.create_task(
        read_ranges(transport, peer, [TransferRange(0, 0, 8)], 5.0, CLOCK)
    )
    for _ in range(2):
        await CLOCK.sleep(0.1)
        reading.cancel()
    try:
        await reading
    except asyncio.CancelledError:
        return CLOCK.monotonic()
    raise AssertionError("the cancelled read returned; it must raise")


def test_read_cancelled_twice_still_waits_until_nothing_writes() -> None:
    assert simulate(read_and_cancel_twice(0.7)) == pytest.approx(0.7, abs=0.01)


def test_read_cancelled_twice_still_reports_an_unfinished_transfer() -> None:
    with pytest.raises(TransferFailed, match="can't release a read") as failure:
        simulate(read_and_cancel_twice(100.0))
    assert len(failure.value.unfinished_transfers) == 1


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_range_outside_the_region_is_invalid_whatever_the_number_of_groups(
    num_blocks: int,
) -> None:
    """Each block is a group of its own, and groups are read concurrently."""

    async def read() -> None:
        memory = bytearray(num_blocks * GROUP_BYTES)
        transport = MemoryTransport(MemoryFabric(), "reader", 1, CLOCK)
        transport.register(Region(0, len(memory)))
        peer = transport.connect(Endpoint("memory", "reader", 1, "here", len(memory), b""))
        beyond = len(memory) + 1
        ranges = [
            TransferRange(beyond, block * GROUP_BYTES, GROUP_BYTES) for block in range(num_blocks)
        ]
        await read_and_verify(transport, peer, ranges, lambda first, last: [], 5.0, CLOCK)

    with pytest.raises(Invalid, match="lies outside the remote region"):
        simulate(read())


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def wall_nanoseconds(self) -> int:
        return int(self.seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class SlowReads(MemoryTransport):
    """A transport whose transfers take a second each."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MemoryFabric(), "reader", 1, clock)
        self._manual = clock

    def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
        self._manual.seconds += 1.0


def test_time_of_the_link_is_without_the_verification() -> None:
    """A read takes a second, and verifying it 2 s, as decoding it would."""
    clock = ManualClock()

    def verify(first: int, last: int) -> list[bool]:
        clock.seconds += 2.0
        return [True] * (last - first)

    async def read() -> VerifiedReadResult:
        memory = bytearray(64)
        transport = SlowReads(clock)
        transport.register(Region(0, len(memory)))
        peer = transport.connect(Endpoint("memory", "reader", 1, "here", len(memory), b""))
        ranges = [TransferRange(0, 8, 8)]
        return await read_and_verify(transport, peer, ranges, verify, 5.0, clock)

    assert simulate(read()) == VerifiedReadResult(8, 3.0, 1, 1.0)
