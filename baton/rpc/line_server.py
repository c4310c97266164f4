"""Lines, from the side that is called: a worker's or a conductor's."""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

from baton.core.address import host_port
from baton.core.trust import Trust
from baton.errors import BatonError, Invalid, Overloaded, Unauthorized, Unavailable
from baton.listening import announce, member_lock
from baton.rpc.line import NONCE_BYTES, VERSION, Kind, Line, parsed, proof_of
from baton.rpc.v1 import line_pb2 as pb
from baton.tls import server_context

TICK_SECONDS, PATIENCE = 2.0, 4
"""A router that stands still holds what it has asked for, for ten seconds: others take nothing from
it, and it may come back."""

HELLO_SECONDS = 2.0
"""From a connection to its proof, and before that for TLS to shake hands."""

MAX_LINES = 1024
"""One for each router, in the main; each costs some kilobytes."""

MAX_STRANGERS = 64
"""Connections that have not proved anything yet, within the above."""

GRACE_SECONDS = 0.2
"""For what was said last to go out, when a server closes."""


class Service(Protocol):
    """What one line carries."""

    def on_message(self, payload: bytes) -> None:
        """Raises BatonError: the line ends with it."""
        ...

    def on_lost(self) -> None:
        """Frees what came over the line. Called once."""
        ...


OpenService = Callable[[Line], Service]


class LineServer:
    """Serves each of ``services``, by name, to whoever is trusted."""

    def __init__(self, trust: Trust, services: Mapping[str, OpenService]) -> None:
        self._trust = trust
        self._services = services
        self._server: asyncio.Server | None = None
        self.lines: set[ServerLine] = set()

    async def listen(self, host: str, port: int) -> int:
        """Returns the port. Raises Unavailable when it can't be bound, Invalid for certificates."""
        loop, context = asyncio.get_running_loop(), server_context(self._trust)
        try:
            seconds = HELLO_SECONDS if context is not None else None
            self._server = await loop.create_server(
                self._visit, host, port, ssl=context, ssl_handshake_timeout=seconds
            )
        except OSError as error:
            raise Unavailable(f"can't listen on {host}:{port}: {error.strerror}") from error
        for listener in self._server.sockets:
            address = listener.getsockname()
            announce("line", host_port(address[0], address[1]), member_lock(self._trust))
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Takes nobody new, and ends all lines."""
        if self._server is None:
            return
        self._server.close()
        if self.lines:
            await asyncio.sleep(GRACE_SECONDS)
        for line in list(self.lines):
            line.refuse(Unavailable("it has stopped"))

    def _visit(self) -> "ServerLine":
        return ServerLine(self, self._trust.secret, self._services)

    @property
    def num_strangers(self) -> int:
        return sum(not line.is_open for line in self.lines)


class ServerLine(Line):
    def __init__(
        self, server: LineServer, secret: str | None, services: Mapping[str, OpenService]
    ) -> None:
        super().__init__(TICK_SECONDS, PATIENCE)
        self._server = server
        self._secret = secret
        self._services = services
        self._name = ""
        self._nonces = b""
        self._service: Service | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server = self._server
        if len(server.lines) >= MAX_LINES or server.num_strangers >= MAX_STRANGERS:
            self.close()
            return
        server.lines.add(self)
        self._arm(HELLO_SECONDS, self.close)

    def on_handshake(self, kind: int, payload: bytes) -> None:
        if kind == Kind.HELLO and not self._nonces:
            self._challenge(parsed(pb.Hello, payload))
        elif kind == Kind.PROOF and self._nonces:
            self._welcome(parsed(pb.Proof, payload).code)
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
        self.send(0, Kind.CHALLENGE, pb.Challenge(nonce=nonce).SerializeToString())

    def _welcome(self, code: bytes) -> None:
        answer = b""
        if self._secret is not None:
            if not hmac.compare_digest(code, self._code(self._secret, "client")):
                message = "the cluster secret is missing or wrong (setting cluster_secret)"
                raise Unauthorized(message)
            answer = self._code(self._secret, "server")
        self._service = self._services[self._name](self)
        self.open()
        self.send(0, Kind.WELCOME, pb.Welcome(code=answer).SerializeToString())

    def _code(self, secret: str, speaker: str) -> bytes:
        return proof_of(secret, speaker, self._name, self._nonces)

    def on_message(self, payload: bytes) -> None:
        assert self._service is not None, "a line opens with its service"
        self._service.on_message(payload)

    def on_unread(self) -> None:
        self.lose(Overloaded("the router left too much unread"))

    def on_lost(self, failure: BatonError) -> None:
        self._server.lines.discard(self)
        if self._service is not None:
            self._service.on_lost()
