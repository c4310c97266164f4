"""Watches the tenants file and sends usage to the usage store, in the background."""

import asyncio
from contextlib import suppress

import structlog

from baton.clock import Clock
from baton.errors import BatonError, Unavailable
from router.tenants.tenants_file_watcher import TenantsFileWatcher
from router.tenants.usage_recorder import UsageRecorder
from router.tenants.usage_store import UsageStore

FLUSH_SECONDS = 2.0
"""The interval between flushes. If a router is killed while the usage store is reachable, at most
the usage of this time is lost."""

FINAL_FLUSH_TIMEOUT_SECONDS = 2.0
"""The timeout of the last flush, when the router stops; Redis may already be gone."""

log = structlog.get_logger(__name__)


class UsageFlusher:
    """Sends the tenants' usage to the usage store at intervals. Also runs ``watcher``, which loads
    changes of the tenants file; it is None if there is no such file. ``writer`` identifies this
    incarnation of this router to the store."""

    def __init__(
        self,
        watcher: TenantsFileWatcher | None,
        recorder: UsageRecorder,
        store: UsageStore,
        writer: str,
        clock: Clock,
    ) -> None:
        self._watcher = watcher
        self._recorder = recorder
        self._store = store
        self._writer = writer
        self._clock = clock
        self._sending = asyncio.Lock()
        self._last_error = ""

    async def run(self) -> None:
        """Watch the tenants file and send usage until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._watcher is not None:
                tasks.create_task(self._watcher.run())
            tasks.create_task(self._flush_regularly())

    async def stop(self) -> None:
        """Send the remaining usage. Give up if that fails, or after
        :data:`FINAL_FLUSH_TIMEOUT_SECONDS`."""
        with suppress(BatonError, TimeoutError):
            async with asyncio.timeout(FINAL_FLUSH_TIMEOUT_SECONDS):
                await self.flush()

    async def flush(self) -> None:
        """Send new usage now. Raises Unavailable if the store can't be reached; the next flush then
        sends the usage again, and the store counts it only once."""
        async with self._sending:
            await self._recorder.flush(self._store, self._writer)

    async def _flush_regularly(self) -> None:
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            try:
                await self.flush()
            except Unavailable as error:
                if str(error) != self._last_error:
                    log.warning(
                        "usage_not_sent",
                        error=str(error),
                        effect="the usage is kept and sent again with the next flush",
                    )
                self._last_error = str(error)
            else:
                self._last_error = ""
