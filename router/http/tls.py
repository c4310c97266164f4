"""The router's certificate: read at the start, and again whenever its file has changed."""

import asyncio
import ssl
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.errors import Invalid

log = structlog.get_logger(__name__)

CERTIFICATE_POLL_SECONDS = 5.0


class ReloadingCertificate:
    """``context`` is what a server needs. New connections get what was read last; those that there
    are stay as they are."""

    def __init__(self, certificate: str, key: str, clock: Clock) -> None:
        """Raises Invalid for files that are no certificate and its key."""
        self._certificate = certificate
        self._key = key
        self._clock = clock
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._seen = self._look()
        self._read()

    async def run(self) -> None:
        """Looks for newer files until cancelled. What can't be read or does not belong together, as
        while only one of both is new, changes nothing."""
        while True:
            await self._clock.sleep(CERTIFICATE_POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        try:
            self._read()
        except Invalid as error:
            log.warning("certificate_unchanged", error=str(error))
            return
        self._seen = seen
        log.info("certificate_changed", file=self._certificate)

    def _read(self) -> None:
        try:
            self._fresh().load_cert_chain(self._certificate, self._key)  # both or nothing
            self.context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            files = f"tls_certificate {self._certificate}, tls_key {self._key}"
            raise Invalid(f"{files}: {error}") from error

    def _look(self) -> tuple[int, ...]:
        """Tells one state of the files from another."""
        try:
            stats = [Path(path).stat() for path in (self._certificate, self._key)]
        except OSError:
            return ()
        return tuple(value for stat in stats for value in (stat.st_mtime_ns, stat.st_ino))

    @staticmethod
    def _fresh() -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
