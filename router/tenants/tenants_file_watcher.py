"""The tenants file while the router runs: read again whenever it changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.errors import Invalid
from router.tenants.metrics import TenantMetrics
from router.tenants.tenant_directory import TenantDirectory
from router.tenants.tenants_file import load_tenants_file

TENANTS_FILE_POLL_SECONDS = 1.0

log = structlog.get_logger(__name__)

Signature = tuple[int, ...] | None


class TenantsFileWatcher:
    """Looks at the file itself, through every link: a mounted Kubernetes secret is replaced by
    turning a link, and an editor's file by renaming."""

    def __init__(
        self,
        path: Path,
        admit: Callable[[TenantDirectory], None],
        metrics: TenantMetrics,
        clock: Clock,
    ) -> None:
        self._path = path
        self._admit = admit
        self._metrics = metrics
        self._clock = clock
        self._seen: Signature = None

    def read(self) -> None:
        """For the first time. Raises Invalid: a router with a wrong file does not start."""
        self._seen = _file_signature(self._path)
        self._admit(load_tenants_file(self._path))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(TENANTS_FILE_POLL_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Takes over a file that has changed. A wrong one changes nothing: that is said in the log
        and in the metrics, until there is a right one."""
        seen = await asyncio.to_thread(_file_signature, self._path)
        if seen == self._seen:
            return
        # Of before it was read: who writes while it is read is looked at again.
        self._seen = seen
        try:
            roll = await asyncio.to_thread(load_tenants_file, self._path)
            self._admit(roll)
        except Invalid as error:
            self._metrics.file_failures.inc()
            self._metrics.file_stale.set(1)
            log.error("tenants_file_refused", error=str(error), stays="the one before")
            return
        self._metrics.file_stale.set(0)
        log.info("tenants_file_read", tenants=len(roll.tenants), keys=len(roll.keys))


def _file_signature(path: Path) -> Signature:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
