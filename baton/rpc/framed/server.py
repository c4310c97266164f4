"""The server's side of framed connections, over TCP or a Unix socket."""

import asyncio
import hmac
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Overloaded, Unauthorized, Unavailable
from baton.network.address import host_port
from baton.network.listeners import FILE_PERMISSIONS, announce_listener, member_authentication
from baton.network.tls import server_context
from baton.rpc.framed.connection import (
    NONCE_BYTES,
    VERSION,
    FramedConnection,
    FrameKind,
    handshake_proof,
    parse_message,
)
from baton.rpc.framed.unauthenticated import UnauthenticatedConnections
from baton.rpc.v1 import framed_pb2 as pb
from baton.system.peer_user import is_same_user
from baton.system.unix_socket import listen_privately

TICK_SECONDS, MAX_SILENT_TICKS = 2.0, 4
"""A router that hangs is considered lost after 10 to 12 s. Until then the worker keeps its
requests: it may recover, and this harms no other router."""

HANDSHAKE_TIMEOUT_SECONDS = 2.0
"""Timeout for a client to authenticate; the TLS handshake before it has the same timeout."""

MAX_CONNECTIONS = 1024
"""Maximum number of authenticated connections: usually one per router; each costs some
kilobytes."""

MAX_UNAUTHENTICATED = 256
"""Maximum number of connections that are not authenticated yet, in addition to
:data:`MAX_CONNECTIONS`. With 2,000 new ones per second, each has a tenth of a second to
authenticate."""

FLUSH_SECONDS = 0.2
"""Time to send the last messages when a server closes."""


class FramedService(Protocol):
    """Handles the messages of one framed connection."""

    def on_message(self, payload: bytes) -> None:
        """Handle a message. If this raises a BatonError, the connection ends."""
        ...

    def on_lost(self) -> None:
        """Free the resources of the connection, which has ended. Called once."""
        ...


FramedServiceFactory = Callable[[FramedConnection], FramedService]


class FramedServer:
    """Serves ``services``, which are keyed by name, to authenticated clients. It listens at one TCP
    port, or at one Unix socket."""

    def __init__(
        self, trust: ClusterCredentials, services: Mapping[str, FramedServiceFactory]
    ) -> None:
        self._trust = trust
        self._services = services
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self.connections: set[FramedServerConnection] = set()
        self.unauthenticated = UnauthenticatedConnections(MAX_UNAUTHENTICATED)

    async def listen(self, host: str, port: int) -> int:
        """Start listening, and return the port. Raises Unavailable if the port can't be bound, and
        Invalid if the certificates can't be read."""
        loop, context = asyncio.get_running_loop(), server_context(self._trust)
        try:
            factory = partial(self._new_connection, context)
            self._server = await loop.create_server(factory, host, port)
        except OSError as error:
            raise Unavailable(f"can't listen on {host}:{port}: {error.strerror}") from error
        for listener in self._server.sockets:
            address = listener.getsockname()
            announce_listener(
                "framed", host_port(address[0], address[1]), member_authentication(self._trust)
            )
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_locally(self, path: Path) -> None:
        """Start listening at the Unix socket ``path``. Only processes of the same user can connect:
        the socket's folder is closed to other users, and connections of their processes are closed.
        Raises Unavailable."""
        listener = listen_privately(path)
        self._path = path
        loop, factory = asyncio.get_running_loop(), partial(self._new_connection, None)
        self._server = await loop.create_unix_server(factory, sock=listener)
        announce_listener("local_rpc", str(path), FILE_PERMISSIONS)

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is None:
            return
        self._server.close()
        if self.connections:
            await asyncio.sleep(FLUSH_SECONDS)
        for line in list(self.connections):
            line.refuse(Unavailable("the server has stopped"))
        self.unauthenticated.close_all()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _new_connection(self, context: ssl.SSLContext | None) -> asyncio.Protocol:
        connection = FramedServerConnection(self, self._trust.secret, self._services)
        if context is None:
            return connection
        return TlsHandshake(self.unauthenticated, connection, context)

    @property
    def is_local(self) -> bool:
        return self._path is not None

    @property
    def num_open(self) -> int:
        return sum(line.is_open for line in self.connections)


class TlsHandshake(asyncio.Protocol):
    """A connection during its TLS handshake, before it becomes a framed connection. It counts as
    unauthenticated from the start; asyncio's own TLS server would not report the connection before
    the end of the handshake."""

    def __init__(
        self,
        unauthenticated: UnauthenticatedConnections,
        connection: "FramedServerConnection",
        context: ssl.SSLContext,
    ) -> None:
        self._unauthenticated = unauthenticated
        self._connection = connection
        self._context = context
        self._early = b""  # data that arrived together with the end of the handshake
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self._unauthenticated.add(self, peer_host(transport))
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(self._transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        secured: asyncio.Transport | None = None
        try:
            if not transport.is_closing():
                secured = await self._secured(transport)
        except OSError as error:  # TLS errors are OSErrors, too; the connection is closed
            error.with_traceback(None)  # else 256 KiB of buffers in its frames wait for the gc
        finally:
            self._unauthenticated.discard(self)
        if secured is None or secured.is_closing():
            transport.abort()
            return
        secured.set_protocol(self._connection)
        self._connection.connection_made(secured)
        if self._early:
            self._connection.data_received(self._early)

    async def _secured(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        """Do the TLS handshake. Return the encrypted transport, or None if the connection broke
        meanwhile."""
        return await asyncio.get_running_loop().start_tls(
            transport,
            self,
            self._context,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS,
        )


class FramedServerConnection(FramedConnection):
    def __init__(
        self, server: FramedServer, secret: str | None, services: Mapping[str, FramedServiceFactory]
    ) -> None:
        super().__init__(0.0 if server.is_local else TICK_SECONDS, MAX_SILENT_TICKS)
        self._server = server
        self._secret = secret
        self._services = services
        self._name = ""
        self._nonces = b""
        self._service: FramedService | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        if self._server.is_local and not is_same_user(
            transport.get_extra_info("socket"), os.getuid()
        ):
            self.close()
            return
        self._server.unauthenticated.add(self, peer_host(transport))
        self._start_timer(HANDSHAKE_TIMEOUT_SECONDS, self.close)

    def on_handshake(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.HELLO and not self._nonces:
            self._challenge(parse_message(pb.Hello, payload))
        elif kind == FrameKind.PROOF and self._nonces:
            self._welcome(parse_message(pb.Proof, payload).code)
        else:
            raise Invalid(f"a frame of kind {kind} is not allowed at this point of the handshake")

    def _challenge(self, hello: pb.Hello) -> None:
        if hello.version != VERSION:
            raise Invalid(f"the protocol version is {hello.version}; it must be {VERSION}")
        if hello.service not in self._services:
            raise Invalid(f"this server has no service {hello.service!r}")
        if len(hello.nonce) != NONCE_BYTES:
            raise Invalid(
                f"the nonce of the handshake must have {NONCE_BYTES} bytes, not {len(hello.nonce)}"
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._name, self._nonces = hello.service, hello.nonce + nonce
        self.send(0, FrameKind.CHALLENGE, pb.Challenge(nonce=nonce).SerializeToString())

    def _welcome(self, code: bytes) -> None:
        answer = b""
        if self._secret is not None:
            if not hmac.compare_digest(code, self._code(self._secret, "client")):
                message = "the cluster secret is missing or wrong (setting cluster_secret)"
                raise Unauthorized(message)
            answer = self._code(self._secret, "server")
        if self._server.num_open >= MAX_CONNECTIONS:
            raise Overloaded(
                f"this server already has {MAX_CONNECTIONS} framed connections, its maximum"
            )
        self._server.unauthenticated.discard(self)
        self._service = self._services[self._name](self)
        self.complete_handshake(self._service.on_message)
        self.send(0, FrameKind.WELCOME, pb.Welcome(code=answer).SerializeToString())

    def _code(self, secret: str, speaker: str) -> bytes:
        return handshake_proof(secret, speaker, self._name, self._nonces)

    def on_write_buffer_full(self) -> None:
        self.lose(Overloaded("the client left too much data unread"))

    def on_lost(self, failure: BatonError) -> None:
        self._server.connections.discard(self)
        self._server.unauthenticated.discard(self)
        if self._service is not None:
            self._service.on_lost()


def peer_host(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
