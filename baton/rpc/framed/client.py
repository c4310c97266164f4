"""A line, from the side that opens it: a router's."""

import asyncio
import hmac
import secrets
from collections.abc import Callable

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Unauthorized, Unavailable
from baton.network.tls import TLS_NAME, client_context
from baton.rpc.framed.connection import (
    NONCE_BYTES,
    VERSION,
    FramedConnection,
    FrameKind,
    handshake_proof,
    parse_message,
)
from baton.rpc.v1 import line_pb2 as pb

TICK_SECONDS, MAX_SILENT_TICKS = 0.25, 6
"""A peer that stands still, or is cut off, is lost after 1.75 to 2 seconds: it is asked after 0.25
to 0.5, and then has 1.5 to answer, whatever its event loop is busy with."""

Deliver = Callable[[bytes], None]
"""Raises BatonError for a message that makes no sense: the line ends."""


class FramedClientConnection(FramedConnection):
    """Made by :func:`open_framed_connection`."""

    def __init__(self, service: str, secret: str | None, deliver: Deliver) -> None:
        super().__init__(TICK_SECONDS, MAX_SILENT_TICKS)
        self._service = service
        self._secret = secret
        self._deliver = deliver
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[BatonError] = loop.create_future()

    async def opened(self) -> None:
        """Raises what keeps it from being opened."""
        await self._opened

    async def ended(self) -> BatonError:
        """Waits for its end: why."""
        return await asyncio.shield(self._ended)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        hello = pb.Hello(version=VERSION, service=self._service, nonce=self._nonce)
        self.send(0, FrameKind.HELLO, hello.SerializeToString())

    def on_handshake(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.CHALLENGE and not self._nonces:
            self._prove(parse_message(pb.Challenge, payload).nonce)
        elif kind == FrameKind.WELCOME and self._nonces:
            self._check(parse_message(pb.Welcome, payload).code)
            self.open()
            self._opened.set_result(None)
        else:
            raise Invalid(f"a frame of kind {kind} is no part of a line's opening")

    def _prove(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise Invalid(f"a nonce has {NONCE_BYTES} bytes")
        self._nonces = self._nonce + nonce
        code = self._code("client")
        self.send(0, FrameKind.PROOF, pb.Proof(code=code).SerializeToString())

    def _check(self, code: bytes) -> None:
        """Whoever has a secret speaks only with those that know it."""
        if not hmac.compare_digest(code, self._code("server")) and self._secret is not None:
            raise Unauthorized("it does not know the cluster secret (setting cluster_secret)")

    def _code(self, speaker: str) -> bytes:
        if self._secret is None:
            return b""
        return handshake_proof(self._secret, speaker, self._service, self._nonces)

    def on_message(self, payload: bytes) -> None:
        self._deliver(payload)

    def on_lost(self, failure: BatonError) -> None:
        self._ended.set_result(failure)
        if not self._opened.done():
            self._opened.set_exception(failure)
            self._opened.exception()  # whoever waited may have left


async def open_framed_connection(
    address: str, service: str, trust: ClusterCredentials, deliver: Deliver, seconds: float
) -> FramedClientConnection:
    """A line to ``service`` at ``address`` (host:port), within ``seconds``. ``deliver`` gets each
    message. Raises Unavailable, Unauthorized."""
    line: FramedClientConnection | None = None
    try:
        async with asyncio.timeout(seconds):
            line = await _connected(address, service, trust, deliver)
            await line.opened()
            return line
    except TimeoutError as error:
        raise Unavailable(f"no connection within {seconds:g} s") from error
    except OSError as error:
        raise Unavailable(f"it does not accept connections: {error}") from error
    finally:
        if line is not None and not line.is_open:
            line.close()


async def _connected(
    address: str, service: str, trust: ClusterCredentials, deliver: Deliver
) -> FramedClientConnection:
    host, _, port = address.rpartition(":")
    context = client_context(trust)
    _, line = await asyncio.get_running_loop().create_connection(
        lambda: FramedClientConnection(service, trust.secret, deliver),
        host.strip("[]"),
        int(port),
        ssl=context,
        server_hostname=TLS_NAME if context is not None else None,
    )
    return line
