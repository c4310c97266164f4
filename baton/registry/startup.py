"""Waits for the registry when a program starts: both may be starting at once."""

from typing import Protocol

import structlog

from baton.clock import Clock
from baton.errors import Unavailable

POLL_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Pingable(Protocol):
    async def ping(self) -> None:
        """Raises Unavailable if the registry does not answer."""
        ...


async def wait_for_registry(registry: Pingable, clock: Clock, patience_seconds: float) -> None:
    """Wait until the registry answers. Raises Unavailable, with the reason of the last failure,
    after ``patience_seconds``."""
    until, was_logged = clock.monotonic() + patience_seconds, False
    while True:
        try:
            return await registry.ping()
        except Unavailable as error:
            if clock.monotonic() >= until:
                raise
            if not was_logged:
                log.warning(
                    "waits_for_registry", timeout_seconds=patience_seconds, error=str(error)
                )
            was_logged = True
        await clock.sleep(POLL_SECONDS)
