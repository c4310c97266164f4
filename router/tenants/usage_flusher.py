"""What a router does about tenants beside their requests: reads their file, brings usage home."""

import asyncio
from contextlib import suppress

import structlog

from baton.clock import Clock
from baton.errors import BatonError, Unavailable
from router.tenants.tenants_file_watcher import TenantsFileWatcher
from router.tenants.usage_recorder import UsageRecorder
from router.tenants.usage_store import UsageStore

FLUSH_SECONDS = 2.0
"""What a router that is killed forgets at most."""

FINAL_FLUSH_TIMEOUT_SECONDS = 2.0
"""At its end, for a Redis that may be gone already."""

log = structlog.get_logger(__name__)


class UsageFlusher:
    """``writer`` names this life of this router."""

    def __init__(
        self,
        file: TenantsFileWatcher | None,
        ledger: UsageRecorder,
        store: UsageStore,
        writer: str,
        clock: Clock,
    ) -> None:
        self._file = file
        self._ledger = ledger
        self._store = store
        self._writer = writer
        self._clock = clock
        self._sending = asyncio.Lock()
        self._told = ""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._file is not None:
                tasks.create_task(self._file.run())
            tasks.create_task(self._send_for_ever())

    async def stop(self) -> None:
        """Brings the last of it."""
        with suppress(BatonError, TimeoutError):
            async with asyncio.timeout(FINAL_FLUSH_TIMEOUT_SECONDS):
                await self.send()

    async def send(self) -> None:
        """What is new, now. Raises Unavailable: it is sent again later, and counts once."""
        async with self._sending:
            await self._ledger.send(self._store, self._writer)

    async def _send_for_ever(self) -> None:
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            try:
                await self.send()
            except Unavailable as error:
                if str(error) != self._told:
                    log.warning("usage_not_sent", error=str(error))
                self._told = str(error)
            else:
                self._told = ""
