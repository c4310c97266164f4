"""The registry, when a program starts: it may be starting, too."""

from typing import Protocol

import structlog

from baton.clock import Clock
from baton.errors import Unavailable

POLL_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Pingable(Protocol):
    async def ping(self) -> None:
        """Raises Unavailable."""
        ...


async def wait_for_registry(registry: Pingable, clock: Clock, patience_seconds: float) -> None:
    """Returns once it answers. Raises Unavailable, with the last reason, when that takes longer."""
    until, told = clock.monotonic() + patience_seconds, False
    while True:
        try:
            return await registry.ping()
        except Unavailable as error:
            if clock.monotonic() >= until:
                raise
            if not told:
                log.warning("waits_for_registry", seconds=patience_seconds, error=str(error))
            told = True
        await clock.sleep(POLL_SECONDS)
