"""The client's side of a framed connection."""

import asyncio
import hmac
import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.core.credentials import ClusterCredentials
from baton.errors import BatonError, Invalid, Unauthorized, Unavailable, Unresponsive
from baton.network.tls import TLS_NAME, client_context
from baton.rpc.framed.connection import (
    NONCE_BYTES,
    VERSION,
    FramedConnection,
    FrameKind,
    MessageHandler,
    handshake_proof,
    parse_message,
)
from baton.rpc.v1 import framed_pb2 as pb

TICK_SECONDS, MAX_SILENT_TICKS = 0.25, 6
"""A peer that hangs, or is cut off, is considered lost after 1.75 to 2 seconds: it is pinged after
0.25 to 0.5 s, and then has 1.5 s to answer, however busy its event loop is."""

Connection = TypeVar("Connection", bound="FramedClientConnection")


class FramedClientConnection(FramedConnection):
    """The client's side of a framed connection. :func:`open_framed_connection` opens it."""

    def __init__(
        self, service: str, secret: str | None, deliver: MessageHandler, is_local: bool = False
    ) -> None:
        super().__init__(0.0 if is_local else TICK_SECONDS, MAX_SILENT_TICKS)
        self._service = service
        self._secret = secret
        self._deliver = deliver
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[BatonError] = loop.create_future()

    async def wait_until_open(self) -> None:
        """Wait until the handshake is complete. If the connection ends before, raise the reason."""
        await self._opened

    async def wait_until_ended(self) -> BatonError:
        """Wait until the connection ends, and return the reason."""
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
            self.complete_handshake(self._deliver)
            if not self._opened.done():  # otherwise the waiter was cancelled, and closes this
                self._opened.set_result(None)
        else:
            raise Invalid(f"a frame of kind {kind} is not allowed at this point of the handshake")

    def _prove(self, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise Invalid(
                f"the nonce of the handshake must have {NONCE_BYTES} bytes, not {len(nonce)}"
            )
        self._nonces = self._nonce + nonce
        code = self._code("client")
        self.send(0, FrameKind.PROOF, pb.Proof(code=code).SerializeToString())

    def _check(self, code: bytes) -> None:
        """Raise Unauthorized if this side has a secret and the server does not know it."""
        if not hmac.compare_digest(code, self._code("server")) and self._secret is not None:
            raise Unauthorized("the peer does not know the cluster secret (setting cluster_secret)")

    def _code(self, speaker: str) -> bytes:
        if self._secret is None:
            return b""
        return handshake_proof(self._secret, speaker, self._service, self._nonces)

    def on_lost(self, failure: BatonError) -> None:
        self._ended.set_result(failure)
        if not self._opened.done():
            self._opened.set_exception(failure)
            self._opened.exception()  # the waiting task may have been cancelled


async def open_framed_connection(
    address: str,
    service: str,
    trust: ClusterCredentials,
    deliver: MessageHandler,
    timeout_seconds: float,
) -> FramedClientConnection:
    """Open a connection to ``service``, as :func:`connect`. ``deliver`` is called with each message
    from the server."""
    factory = partial(FramedClientConnection, service, trust.secret, deliver)
    return await connect(factory, address, trust, timeout_seconds)


async def connect(
    factory: Callable[..., Connection],
    address: str,
    trust: ClusterCredentials,
    timeout_seconds: float,
) -> Connection:
    """Open the connection that ``factory`` makes to ``address``, which is host:port or the path of
    a Unix socket, and wait until the handshake is complete. Raises Unresponsive if that takes
    longer than ``timeout_seconds``, Unavailable, Unauthorized."""
    try:
        async with asyncio.timeout(timeout_seconds):
            connection = await _connected(factory, address, trust)
            try:
                await connection.wait_until_open()
            except BaseException:  # perhaps cancelled just after the handshake was completed
                connection.close()
                raise
    except TimeoutError as error:
        raise Unresponsive(
            f"no connection to {address} within {timeout_seconds:g} s (handshake included)"
        ) from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"can't connect to {address}: {error}") from error
    return connection


async def _connected(
    factory: Callable[..., Connection], address: str, trust: ClusterCredentials
) -> Connection:
    loop = asyncio.get_running_loop()
    if address.startswith("/"):
        _, connection = await loop.create_unix_connection(partial(factory, is_local=True), address)
        return connection
    host, _, port = address.rpartition(":")
    context = client_context(trust)
    _, connection = await loop.create_connection(
        factory,
        host.strip("[]"),
        int(port),
        ssl=context,
        server_hostname=TLS_NAME if context is not None else None,
    )
    return connection
