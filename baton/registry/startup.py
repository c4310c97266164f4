"""Waits for the registry when a program starts, since the registry may be starting at the same
time."""

from typing import Protocol

import structlog

from baton.clock import Clock
from baton.errors import Unavailable

POLL_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Pingable(Protocol):
    async def ping(self) -> None:
        """Check that the registry answers. Raises Unavailable if it does not."""
        ...


async def wait_for_registry(registry: Pingable, clock: Clock, patience_seconds: float) -> None:
    """Wait until the registry answers. If it does not answer within ``patience_seconds``, raise
    Unavailable with the reason of the last failure."""
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
