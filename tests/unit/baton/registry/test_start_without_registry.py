"""Tests that a program that starts before its registry is reachable waits for it."""

import asyncio

import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.errors import Unavailable
from baton.registry.startup import wait_for_registry


class Late:
    """A registry that refuses pings before the ``number``-th one, and answers all later ones."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.pings = 0

    async def ping(self) -> None:
        self.pings += 1
        if self.pings < self._number:
            raise Unavailable(f"ping {self.pings} was refused")


class QuickClock(ManualClock):
    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


async def test_reachable_registry_is_not_waited_for() -> None:
    await wait_for_registry(Late(1), ManualClock(), 0.0)


async def test_late_registry_is_waited_for_and_logged_once() -> None:
    late, clock = Late(8), QuickClock()
    with capture_logs() as logs:
        await wait_for_registry(late, clock, 30.0)
    assert (late.pings, clock.monotonic()) == (8, 7.0)
    assert [line["error"] for line in logs] == ["ping 1 was refused"]


@pytest.mark.parametrize(("patience", "pings"), [(0.0, 1), (5.0, 6)])
async def test_waiting_for_the_registry_fails_after_the_timeout(
    patience: float, pings: int
) -> None:
    with pytest.raises(Unavailable, match=f"ping {pings} was refused"):
        await wait_for_registry(Late(100), QuickClock(), patience)
