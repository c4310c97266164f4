"""The router's TLS certificate for clients, which is reloaded whenever its files change.

A thread polls the files, so that no client's handshake waits for the disk. Members of the cluster
connect to each other so rarely that their handshakes check for new certificates themselves
(:mod:`baton.network.tls`)."""

import asyncio
import ssl

import structlog

from baton.clock import Clock
from baton.errors import Invalid
from baton.network.tls import FileStamps, file_stamps

log = structlog.get_logger(__name__)

CERTIFICATE_POLL_SECONDS = 5.0


class ReloadingCertificate:
    """A TLS ``context`` whose certificate is reloaded from its files while :meth:`run` runs. New
    connections get the new certificate; existing ones keep theirs."""

    def __init__(self, certificate: str, key: str, clock: Clock) -> None:
        """Load the files. Raises Invalid if they are not a certificate and its key."""
        self._certificate = certificate
        self._key = key
        self._clock = clock
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._stamps = self._stamps_now()
        self._load()

    async def run(self) -> None:
        """Reload the files whenever they change, until cancelled. If the certificate and the key
        can't be read or don't match (for example while only one of them has been replaced), the
        previous certificate stays in use."""
        while True:
            await self._clock.sleep(CERTIFICATE_POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        stamps = self._stamps_now()
        if stamps == self._stamps:
            return
        try:
            self._load()
        except Invalid as error:
            log.warning("certificate_reload_failed", error=str(error))
            return
        self._stamps = stamps
        log.info("certificate_changed", file=self._certificate)

    def _load(self) -> None:
        try:
            # Validate both files before the context in use is changed.
            self._fresh().load_cert_chain(self._certificate, self._key)
            self.context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            files = f"tls_certificate {self._certificate}, tls_key {self._key}"
            raise Invalid(f"the certificate can't be loaded ({files}): {error}") from error

    def _stamps_now(self) -> FileStamps:
        """Return the files' modification times and inodes; empty while a file is missing."""
        try:
            return file_stamps(self._certificate, self._key)
        except OSError:
            return ()

    @staticmethod
    def _fresh() -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
