"""Tests of the staging area: space is allocated once, waiters are served in order, and the part for
own use is never taken for readers."""

import asyncio

import pytest

from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES as UNIT
from baton.errors import DeadlineExceeded, Invalid
from baton.worker.staging_area import StagingArea, StagingRange

LONG = 60.0


def make_area(num_units: int = 16) -> StagingArea:
    return StagingArea(4 * UNIT, num_units * UNIT)


async def test_readers_get_the_first_space_and_own_use_the_last() -> None:
    area = make_area()
    assert area.try_allocate(1, for_reader=True) == StagingRange(4 * UNIT, UNIT)
    assert area.try_allocate(UNIT + 1, for_reader=True) == StagingRange(5 * UNIT, 2 * UNIT)
    assert area.try_allocate(UNIT) == StagingRange(19 * UNIT, UNIT)
    assert area.used_bytes == 4 * UNIT
    area.check_integrity()


async def test_the_last_quarter_is_not_for_readers() -> None:
    area = make_area()
    assert area.try_allocate(12 * UNIT, for_reader=True) is not None
    assert area.try_allocate(1, for_reader=True) is None
    assert area.try_allocate(4 * UNIT) is not None
    assert area.try_allocate(1) is None


async def test_own_use_takes_what_readers_leave() -> None:
    area = make_area()
    taken = [area.try_allocate(4 * UNIT) for _ in range(4)]
    assert None not in taken
    assert area.try_allocate(1, for_reader=True) is None


@pytest.mark.parametrize(("size", "for_reader"), [(13 * UNIT, True), (4 * UNIT + 1, False)])
async def test_what_can_never_be_allocated_for_sure_is_refused(size: int, for_reader: bool) -> None:
    area = make_area()
    assert not area.fits(size, for_reader=for_reader)
    with pytest.raises(Invalid, match="kv_staging_bytes"):
        await area.allocate(size, LONG, for_reader=for_reader)


async def test_an_area_without_bytes_fits_nothing() -> None:
    area = StagingArea(0, 0)
    assert not area.fits(1) and not area.fits(1, for_reader=True)
    assert area.try_allocate(1) is None
    area.check_integrity()


async def test_waiters_are_served_in_order_even_if_a_later_one_would_fit() -> None:
    area = make_area()
    first, second = (area.try_allocate(6 * UNIT, for_reader=True) for _ in range(2))
    assert first is not None and second is not None
    large = asyncio.ensure_future(area.allocate(8 * UNIT, LONG, for_reader=True))
    small = asyncio.ensure_future(area.allocate(UNIT, LONG, for_reader=True))
    await asyncio.sleep(0)
    assert area.num_waiting == 2
    area.release(first)
    assert area.try_allocate(UNIT, for_reader=True) is None, "others wait"
    await asyncio.sleep(0)
    assert not large.done() and not small.done()
    area.check_integrity()
    area.release(second)
    assert await large == StagingRange(4 * UNIT, 8 * UNIT)
    assert await small == StagingRange(12 * UNIT, UNIT)


async def test_own_use_does_not_wait_for_readers() -> None:
    area = make_area()
    assert area.try_allocate(12 * UNIT, for_reader=True) is not None
    waiting = asyncio.ensure_future(area.allocate(UNIT, LONG, for_reader=True))
    await asyncio.sleep(0)
    assert await area.allocate(UNIT, LONG) == StagingRange(19 * UNIT, UNIT)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert area.num_waiting == 0


async def test_a_wait_ends_after_its_time() -> None:
    area = make_area()
    taken = area.try_allocate(12 * UNIT, for_reader=True)
    with pytest.raises(DeadlineExceeded, match="within 0 s"):
        await area.allocate(UNIT, 0, for_reader=True)
    assert taken is not None and area.num_waiting == 0
    area.release(taken)
    assert area.used_bytes == 0
    area.check_integrity()


async def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    area = make_area()
    assert area.try_allocate(10 * UNIT, for_reader=True) is not None
    large = asyncio.ensure_future(area.allocate(4 * UNIT, LONG, for_reader=True))
    small = asyncio.ensure_future(area.allocate(2 * UNIT, LONG, for_reader=True))
    await asyncio.sleep(0)
    large.cancel()
    assert await small == StagingRange(14 * UNIT, 2 * UNIT)


async def test_space_that_was_granted_to_a_cancelled_waiter_is_freed() -> None:
    area = make_area()
    taken = area.try_allocate(12 * UNIT, for_reader=True)
    assert taken is not None
    waiting = asyncio.ensure_future(area.allocate(UNIT, LONG, for_reader=True))
    await asyncio.sleep(0)
    area.release(taken)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert area.used_bytes == 0
    area.check_integrity()


async def test_space_that_is_freed_while_a_cancelled_waiter_has_not_run_goes_to_the_next() -> None:
    area = make_area()
    taken = area.try_allocate(12 * UNIT, for_reader=True)
    assert taken is not None
    first, second = (
        asyncio.ensure_future(area.allocate(UNIT, LONG, for_reader=True)) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    area.release(taken)
    area.check_integrity()
    with pytest.raises(asyncio.CancelledError):
        await first
    area.release(await second)
    assert (area.used_bytes, area.num_waiting) == (0, 0)
    area.check_integrity()


async def test_a_range_is_freed_once() -> None:
    area = make_area()
    taken = area.try_allocate(UNIT)
    assert taken is not None
    area.release(taken)
    with pytest.raises(AssertionError, match="not allocated"):
        area.release(taken)


async def test_the_description_counts_ranges() -> None:
    area = make_area()
    area.try_allocate(UNIT)
    assert area.describe() == "staging: 256 of 4,096 bytes in 1 ranges, 0 waiting"
