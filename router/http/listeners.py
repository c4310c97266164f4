"""Where a router listens: the port that clients know, and, where several share that one, an address
of its own beside it."""

import asyncio
import resource
import socket
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp

from baton.clock import Clock
from baton.config import Settings
from baton.network.address import host_port
from baton.network.listeners import announce_listener, http_authentication
from router.http.connection import ConnectionLimits
from router.http.server import HttpServer, open_listener
from router.http.tls import ReloadingCertificate

log = structlog.get_logger(__name__)

RESERVED_OPEN_FILES = 512
"""Open files of a router beside clients' connections: streams to workers, conductors, logs."""


class HttpListeners:
    """:meth:`open`, then :meth:`run`; :meth:`leave` when others are to take over, :meth:`close` in
    the end."""

    def __init__(
        self, settings: Settings, app: ASGIApp, clock: Clock, on_refusal: Callable[[str], None]
    ) -> None:
        """Raises Invalid for a certificate that is none."""
        self._settings = settings
        self._certificate = _certificate(settings, clock)
        self._server = HttpServer(
            app,
            clock,
            connection_limits(settings),
            on_refusal,
            self._certificate.context if self._certificate is not None else None,
        )
        self._shared: socket.socket | None = None
        self._own: socket.socket | None = None

    def open(self) -> None:
        """From now on connections wait. Raises Unavailable."""
        settings = self._settings
        self._shared = open_listener(settings.host, settings.port, reuse_port=settings.reuse_port)
        if settings.reuse_port:
            self._own = open_listener(settings.host, 0)
        lock = http_authentication(
            bool(settings.api_keys or settings.tenants_file), self._certificate is not None
        )
        for listener in (self._shared, self._own):
            if listener is not None:
                announce_listener("http", host_port(*listener.getsockname()[:2]), lock)

    async def run(self, on_listening: Callable[[], None]) -> None:
        """Until cancelled."""
        for listener in (self._own, self._shared):
            if listener is not None:
                await self._server.listen(listener)
        on_listening()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            if self._certificate is not None:
                tasks.create_task(self._certificate.run())

    async def leave(self) -> None:
        """The port is the others' from now on. Returns when nobody is being answered."""
        if self._shared is not None:
            await self._server.leave(self._shared)
            self._shared = None
        await self._server.finish()

    async def close(self) -> None:
        await self._server.close()
        for listener in (self._own, self._shared):
            if listener is not None:
                listener.close()

    @property
    def num_connections(self) -> int:
        return self._server.num_connections

    @property
    def address(self) -> str:
        """host:port that reach this router and no other; empty before :meth:`open`."""
        listener = self._own or self._shared
        if listener is None:
            return ""
        host = self._settings.advertise_address or self._settings.host
        return host_port(host, listener.getsockname()[1])


def connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=min(
            settings.max_connections, raise_open_file_limit() - RESERVED_OPEN_FILES
        ),
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        max_body_bytes=settings.max_body_bytes,
        max_file_bytes=settings.max_file_bytes,
        header_seconds=settings.header_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
        write_seconds=settings.write_seconds,
    )


def raise_open_file_limit() -> int:
    """As many as the system lets this process have; it says so when those are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = hard if hard != resource.RLIM_INFINITY else 2**20
    if limit < 4096 + RESERVED_OPEN_FILES:
        log.warning("few_open_files", limit=limit, mend="raise the hard limit (ulimit -Hn)")
    return max(limit, RESERVED_OPEN_FILES + 16)


def _certificate(settings: Settings, clock: Clock) -> ReloadingCertificate | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ReloadingCertificate(settings.tls_certificate, settings.tls_key, clock)
