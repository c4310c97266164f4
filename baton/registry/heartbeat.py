"""Keeps a member's lease alive, through outages of the registry."""

import asyncio
from collections.abc import Callable

import structlog

from baton.clock import Clock
from baton.core.member import Member
from baton.errors import BatonError, Unavailable
from baton.registry.base import Registry

TTL_HEARTBEATS = 3
"""A member that misses so many beats is gone."""

log = structlog.get_logger(__name__)


class Heartbeat:
    """Announces what ``describe`` says, every ``interval_seconds``, and at once on
    :meth:`hurry`. Ends with Unavailable when a newer life of the same member has taken over."""

    def __init__(
        self,
        registry: Registry,
        describe: Callable[[], Member],
        clock: Clock,
        interval_seconds: float = 1.0,
    ) -> None:
        self._registry = registry
        self._describe = describe
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """What ``describe`` says has changed in a way that others should know now."""
        self._hurry.set()

    async def run(self) -> None:
        """Until cancelled; withdraws at the end."""
        try:
            while True:
                self._hurry.clear()  # before: what changes during a beat asks for another
                await self.beat()
                try:
                    async with asyncio.timeout(self._interval_seconds):
                        await self._hurry.wait()
                except TimeoutError:
                    pass
        finally:
            await self._withdraw()

    async def beat(self) -> None:
        """One announcement; an unreachable registry is logged, and tried again next time."""
        member = self._describe()
        try:
            kept = await self._registry.announce(member, TTL_HEARTBEATS * self._interval_seconds)
        except BatonError as error:
            log.warning("heartbeat_failed", error=str(error))
            return
        if not kept:
            raise Unavailable(f"a newer {member.id} has taken over")

    async def _withdraw(self) -> None:
        member = self._describe()
        try:
            await self._registry.withdraw(member.id, member.generation)
        except BatonError as error:
            log.warning("withdrawal_failed", error=str(error))
