"""Lines, from the side that is called: a worker's or a conductor's."""

import asyncio
import hmac
import secrets
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, cast

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Overloaded, Unauthorized, Unavailable
from baton.network.address import host_port
from baton.network.listeners import announce_listener, member_authentication
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
from baton.rpc.v1 import line_pb2 as pb

TICK_SECONDS, PATIENCE = 2.0, 4
"""A router that stands still holds what it has asked for, for ten seconds: others take nothing from
it, and it may come back."""

HANDSHAKE_TIMEOUT_SECONDS = 2.0
"""From a connection to its proof, and before that for TLS to shake hands."""

MAX_CONNECTIONS = 1024
"""One for each router, in the main; each costs some kilobytes."""

MAX_UNAUTHENTICATED = 256
"""Connections that have not proved anything yet, beside the above: with 2,000 new ones a second,
each has a tenth of a second."""

FLUSH_SECONDS = 0.2
"""For what was said last to go out, when a server closes."""


class FramedService(Protocol):
    """What one line carries."""

    def on_message(self, payload: bytes) -> None:
        """Raises BatonError: the line ends with it."""
        ...

    def on_lost(self) -> None:
        """Frees what came over the line. Called once."""
        ...


FramedServiceFactory = Callable[[FramedConnection], FramedService]


class FramedServer:
    """Serves each of ``services``, by name, to whoever is trusted."""

    def __init__(
        self, trust: ClusterCredentials, services: Mapping[str, FramedServiceFactory]
    ) -> None:
        self._trust = trust
        self._services = services
        self._server: asyncio.Server | None = None
        self.lines: set[FramedServerConnection] = set()
        self.strangers = UnauthenticatedConnections(MAX_UNAUTHENTICATED)

    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises Unavailable when it can't be bound, Invalid for certificates."""
        loop, context = asyncio.get_running_loop(), server_context(self._trust)
        try:
            self._server = await loop.create_server(partial(self._visit, context), host, port)
        except OSError as error:
            raise Unavailable(f"can't listen on {host}:{port}: {error.strerror}") from error
        for listener in self._server.sockets:
            address = listener.getsockname()
            announce_listener(
                "line", host_port(address[0], address[1]), member_authentication(self._trust)
            )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Takes nobody new, and ends all lines."""
        if self._server is None:
            return
        self._server.close()
        if self.lines:
            await asyncio.sleep(FLUSH_SECONDS)
        for line in list(self.lines):
            line.refuse(Unavailable("it has stopped"))
        self.strangers.close_all()

    def _visit(self, context: ssl.SSLContext | None) -> asyncio.Protocol:
        line = FramedServerConnection(self, self._trust.secret, self._services)
        return line if context is None else TlsHandshake(self.strangers, line, context)

    @property
    def num_open(self) -> int:
        return sum(line.is_open for line in self.lines)


class TlsHandshake(asyncio.Protocol):
    """A connection that shakes hands, until it is a line. It counts as a stranger from the start,
    which a server of asyncio's own would not see."""

    def __init__(
        self,
        strangers: UnauthenticatedConnections,
        line: "FramedServerConnection",
        context: ssl.SSLContext,
    ) -> None:
        self._strangers = strangers
        self._line = line
        self._context = context
        self._early = b""  # what came with the end of the handshake
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self._strangers.add(self, peer_host(transport))
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
        except OSError as error:  # so are errors of TLS; the connection is closed
            error.with_traceback(None)  # else its frames, and 256 KiB of buffers, wait for gc
        finally:
            self._strangers.discard(self)
        if secured is None or secured.is_closing():
            transport.abort()
            return
        secured.set_protocol(self._line)
        self._line.connection_made(secured)
        if self._early:
            self._line.data_received(self._early)

    async def _secured(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        """None when the connection broke meanwhile."""
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
        super().__init__(TICK_SECONDS, PATIENCE)
        self._server = server
        self._secret = secret
        self._services = services
        self._name = ""
        self._nonces = b""
        self._service: FramedService | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.lines.add(self)
        self._server.strangers.add(self, peer_host(transport))
        self._arm(HANDSHAKE_TIMEOUT_SECONDS, self.close)

    def on_handshake(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.HELLO and not self._nonces:
            self._challenge(parse_message(pb.Hello, payload))
        elif kind == FrameKind.PROOF and self._nonces:
            self._welcome(parse_message(pb.Proof, payload).code)
        else:
            raise Invalid(f"a frame of kind {kind} is no part of a line's opening")

    def _challenge(self, hello: pb.Hello) -> None:
        if hello.version != VERSION:
            raise Invalid(f"version {hello.version} of lines: here is {VERSION}")
        if hello.service not in self._services:
            raise Invalid(f"there is no service {hello.service!r} here")
        if len(hello.nonce) != NONCE_BYTES:
            raise Invalid(f"a nonce has {NONCE_BYTES} bytes")
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
            raise Overloaded(f"there are {MAX_CONNECTIONS} lines already")
        self._server.strangers.discard(self)
        self._service = self._services[self._name](self)
        self.open()
        self.send(0, FrameKind.WELCOME, pb.Welcome(code=answer).SerializeToString())

    def _code(self, secret: str, speaker: str) -> bytes:
        return handshake_proof(secret, speaker, self._name, self._nonces)

    def on_message(self, payload: bytes) -> None:
        assert self._service is not None, "a line opens with its service"
        self._service.on_message(payload)

    def on_unread(self) -> None:
        self.lose(Overloaded("the router left too much unread"))

    def on_lost(self, failure: BatonError) -> None:
        self._server.lines.discard(self)
        self._server.strangers.discard(self)
        if self._service is not None:
            self._service.on_lost()


def peer_host(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
