"""Reloads the tenants file whenever it changes while the router runs."""

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
    """Watches the tenants file at its path and follows symbolic links: Kubernetes replaces a
    mounted secret by changing a link, and editors replace a file by renaming another one."""

    def __init__(
        self,
        path: Path,
        on_directory: Callable[[TenantDirectory], None],
        metrics: TenantMetrics,
        clock: Clock,
    ) -> None:
        self._path = path
        self._on_directory = on_directory
        self._metrics = metrics
        self._clock = clock
        self._signature: Signature = None

    def load(self) -> None:
        """Read the file for the first time. Raises Invalid, since a router does not start with an
        invalid file."""
        self._signature = _file_signature(self._path)
        self._on_directory(load_tenants_file(self._path))

    async def run(self) -> None:
        """Reload the tenants file whenever it changes, until cancelled."""
        while True:
            await self._clock.sleep(TENANTS_FILE_POLL_SECONDS)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Reload the file if it has changed. If the new file is invalid, log that, set the metric
        ``baton_tenants_file_stale`` until it is fixed, and keep the previous tenants."""
        signature = await asyncio.to_thread(_file_signature, self._path)
        if signature == self._signature:
            return
        # The signature was taken before the file is read, so a change in between is noticed later.
        self._signature = signature
        try:
            directory = await asyncio.to_thread(load_tenants_file, self._path)
            self._on_directory(directory)
        except Invalid as error:
            self._metrics.file_failures.inc()
            self._metrics.file_stale.set(1)
            log.error(
                "tenants_file_refused",
                error=str(error),
                effect="the tenants of the last valid file stay in use",
            )
            return
        self._metrics.file_stale.set(0)
        log.info("tenants_file_read", tenants=len(directory.tenants), keys=len(directory.keys))


def _file_signature(path: Path) -> Signature:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
