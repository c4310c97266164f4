"""The addresses that a router listens on: the port for clients, and, if several routers share that
port, an address of its own."""

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
from router.http.connection_limits import ConnectionLimits
from router.http.server import HttpServer, open_listener
from router.http.tls import ReloadingCertificate
from router.limits import RESERVED_OPEN_FILES

log = structlog.get_logger(__name__)


class HttpListeners:
    """Opens and serves the listeners. Call :meth:`open`, then :meth:`run`. Call
    :meth:`stop_listening` when other routers take over, and :meth:`close` at the end."""

    def __init__(
        self, settings: Settings, app: ASGIApp, clock: Clock, on_refusal: Callable[[str], None]
    ) -> None:
        """Load the TLS certificate, if one is configured. Raises Invalid for an invalid
        certificate."""
        self._settings = settings
        self._certificate = _certificate(settings, clock)
        self._server = HttpServer(
            app,
            clock,
            connection_limits(settings),
            on_refusal,
            self._certificate.context if self._certificate is not None else None,
        )
        self._shared_listener: socket.socket | None = None
        self._own_listener: socket.socket | None = None

    def open(self) -> None:
        """Open the sockets: connections queue until :meth:`run` accepts them. Raises Unavailable if
        the router can't listen on an address."""
        settings = self._settings
        self._shared_listener = open_listener(
            settings.host, settings.port, reuse_port=settings.reuse_port
        )
        if settings.reuse_port:
            self._own_listener = open_listener(settings.host, 0)
        authentication = http_authentication(
            bool(settings.api_keys or settings.tenants_file), self._certificate is not None
        )
        for listener in (self._shared_listener, self._own_listener):
            if listener is not None:
                announce_listener("http", host_port(*listener.getsockname()[:2]), authentication)

    async def run(self, on_listening: Callable[[], None]) -> None:
        """Accept connections and serve them until cancelled."""
        for listener in (self._own_listener, self._shared_listener):
            if listener is not None:
                self._server.listen(listener)
        on_listening()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            if self._certificate is not None:
                tasks.create_task(self._certificate.run())

    def set_max_body_bytes(self, max_body_bytes: int) -> None:
        """Change the limit on request bodies for connections that are opened from now on."""
        self._server.set_max_body_bytes(max_body_bytes)

    async def stop_listening(self) -> None:
        """Stop listening on the shared port, and return when no request is in progress."""
        if self._shared_listener is not None:
            self._server.stop_accepting(self._shared_listener)
            self._shared_listener = None
        await self._server.drain()

    async def close(self) -> None:
        await self._server.close()
        for listener in (self._own_listener, self._shared_listener):
            if listener is not None:
                listener.close()

    @property
    def num_connections(self) -> int:
        return self._server.num_connections

    @property
    def address(self) -> str:
        """The host:port that only this router listens on; empty before :meth:`open`."""
        listener = self._own_listener or self._shared_listener
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
        header_timeout_seconds=settings.header_timeout_seconds,
        keep_alive_timeout_seconds=settings.keep_alive_timeout_seconds,
        write_timeout_seconds=settings.write_timeout_seconds,
    )


def raise_open_file_limit() -> int:
    """Raise the limit of open files as far as possible and return it. Logs a warning if it is
    low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = hard if hard != resource.RLIM_INFINITY else 2**20
    if limit < 4096 + RESERVED_OPEN_FILES:
        log.warning("open_file_limit_low", limit=limit, remedy="raise the hard limit (ulimit -Hn)")
    return max(limit, RESERVED_OPEN_FILES + 16)


def _certificate(settings: Settings, clock: Clock) -> ReloadingCertificate | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ReloadingCertificate(settings.tls_certificate, settings.tls_key, clock)
