"""Renews a member's lease in the registry, and keeps trying during outages."""

import asyncio
from collections.abc import Callable

import structlog

from baton.clock import Clock
from baton.core.member import Member
from baton.errors import BatonError, Unavailable
from baton.registry.base import Registry

TTL_HEARTBEATS = 3
"""A member's lease lasts for this many heartbeats."""

log = structlog.get_logger(__name__)


class Heartbeat:
    """Announces the member that ``describe`` returns, every ``interval_seconds``, and at once on
    :meth:`announce_now`. Raises Unavailable when a newer generation of the same member has taken
    over."""

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
        self._announce_requested = asyncio.Event()

    def announce_now(self) -> None:
        """Announce the member now instead of at the next heartbeat, because it has changed."""
        self._announce_requested.set()

    async def run(self) -> None:
        """Send heartbeats until cancelled; at the end, withdraw the member from the registry."""
        try:
            while True:
                # Cleared first, so that a change during a heartbeat causes another one.
                self._announce_requested.clear()
                await self.announce()
                try:
                    async with asyncio.timeout(self._interval_seconds):
                        await self._announce_requested.wait()
                except TimeoutError:
                    pass
        finally:
            await self._withdraw()

    async def announce(self) -> None:
        """Announce the member once. If the registry can't be reached, log that; the next heartbeat
        tries again. Raises Unavailable when a newer generation has taken over."""
        member = self._describe()
        try:
            kept = await self._registry.announce(member, TTL_HEARTBEATS * self._interval_seconds)
        except BatonError as error:
            log.warning("heartbeat_failed", error=str(error))
            return
        if not kept:
            raise Unavailable(f"a newer process of {member.id} has taken over")

    async def _withdraw(self) -> None:
        member = self._describe()
        try:
            await self._registry.withdraw(member.id, member.generation)
        except BatonError as error:
            log.warning("deregistration_failed", error=str(error))
