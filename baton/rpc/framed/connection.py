"""A line: one stream of messages between two programs, over a TCP connection of its own.

A stream of gRPC's costs its Python side some 0.1 ms for each message and a thread that polls; a
frame costs a few microseconds. So the two streams that a router has most to do with, ``Worker.Run``
and ``Conductor.PlaceMany``, go over lines where both sides can, with the same messages and the same
meaning: a stream is the lease of all that came over it.

Both ends ping who has been silent. A frozen peer's kernel goes on acknowledging, so what counts is
what its event loop answers.
"""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, Invalid, Unavailable, Unresponsive
from baton.rpc.convert.error import error_from_proto, error_to_proto
from baton.rpc.frames import MAX_MESSAGE_BYTES, FrameProtocol
from baton.rpc.v1 import conductor_pb2 as pb

VERSION = 1
NONCE_BYTES = 32

HANDSHAKE_BYTES = 4096
"""Of a frame, before its sender is known."""

CLOSE_SECONDS = 2.0
"""For a peer to read why it is refused."""

Parsed = TypeVar("Parsed", bound=Message)

log = structlog.get_logger(__name__)


class FrameKind(IntEnum):
    """Of a frame."""

    MESSAGE = 1
    PING = 2
    PONG = 3
    REFUSAL = 4  # and the end
    HELLO = 5
    CHALLENGE = 6
    PROOF = 7
    WELCOME = 8


class FramedConnection(FrameProtocol):
    """One end. Opened by a handshake (:mod:`baton.rpc.framed.client`,
    :mod:`baton.rpc.framed.server`); over with :meth:`on_lost`, which is called once.

    Every ``tick_seconds`` without a sign of the peer it is pinged, and after more than ``patience``
    of them in a row it is lost. Ticks are counted, not seconds: between two of them this loop has
    read what there was, so whoever stood still itself does not take others for dead.
    """

    def __init__(self, tick_seconds: float, patience: int) -> None:
        super().__init__()
        self.max_payload_bytes = HANDSHAKE_BYTES
        self._tick_seconds = tick_seconds
        self._patience = patience
        self.is_open = False
        self._heard = True
        self._num_silent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None  # while the peer does not read
        self._over = False

    # -- for its owner ----------------------------------------------------------------------

    def send_message(self, payload: bytes) -> None:
        self.send(0, FrameKind.MESSAGE, payload)

    async def drained(self) -> None:
        """Returns once the peer reads, or is lost. For one task at a time."""
        if self._writable is not None:
            await self._writable

    def refuse(self, error: BatonError) -> None:
        """Tells the peer why, and ends."""
        if self._over or self.transport is None:
            return
        self.send(0, FrameKind.REFUSAL, error_to_proto(error).SerializeToString())
        self.transport.close()
        self._arm(CLOSE_SECONDS, self.close)
        self._end(error)

    def lose(self, error: BatonError) -> None:
        """Ends at once."""
        self.close()
        self._end(error)

    def _end(self, failure: BatonError) -> None:
        if not self._over:
            self._over = True
            self.resume_writing()
            self.on_lost(failure)

    # -- for its kinds ----------------------------------------------------------------------

    def on_message(self, payload: bytes) -> None:
        """Raises BatonError for what the peer should not have sent: it is refused."""
        raise NotImplementedError

    def on_handshake(self, kind: int, payload: bytes) -> None:
        """Raises BatonError likewise."""
        raise NotImplementedError

    def on_lost(self, failure: BatonError) -> None:
        raise NotImplementedError

    def open(self) -> None:
        """The peer is known."""
        self.is_open = True
        self.max_payload_bytes = MAX_MESSAGE_BYTES
        self._arm(self._tick_seconds, self._tick)

    # -- the transport calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # of a socket that is broken already
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        super().data_received(data)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        reason = f"the connection broke: {error}" if error is not None else "the stream ended"
        self._end(Unavailable(reason))

    # -- frames -----------------------------------------------------------------------------

    def on_frame(self, number: int, kind: int, payload: bytes) -> None:
        try:
            if not self.is_open:
                self._on_early(kind, payload)
            elif kind == FrameKind.MESSAGE:
                self.on_message(payload)
            else:
                self._on_control(kind, payload)
        except BatonError as error:
            self.refuse(error)
        except Exception:  # a bug: this line ends, and nothing else does
            log.exception("line_crashed")
            self.refuse(BatonError("internal error"))

    def _on_early(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.REFUSAL:
            self.lose(error_from_proto(parse_message(pb.Refusal, payload)))
        else:
            self.on_handshake(kind, payload)

    def _on_control(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.PING:
            self.send(0, FrameKind.PONG, b"")
        elif kind == FrameKind.REFUSAL:
            self.lose(error_from_proto(parse_message(pb.Refusal, payload)))
        elif kind != FrameKind.PONG:
            raise Invalid(f"a line has no frames of kind {kind} once it is open")

    def on_too_large(self, size_bytes: int) -> None:
        limit = self.max_payload_bytes
        self.refuse(Invalid(f"a frame of {size_bytes} bytes: {limit} are allowed here"))

    def on_unread(self) -> None:
        self.lose(Unavailable("it does not read"))

    # -- signs of life ----------------------------------------------------------------------

    def _tick(self) -> None:
        self._num_silent = 0 if self._heard else self._num_silent + 1
        self._heard = False
        if self._num_silent > self._patience:
            seconds = self._num_silent * self._tick_seconds
            self.lose(Unresponsive(f"it has been silent for {seconds:.1f} s"))
            return
        if self._num_silent:
            self.send(0, FrameKind.PING, b"")
        self._arm(self._tick_seconds, self._tick)

    def _arm(self, seconds: float, call: Callable[[], None]) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def parse_message(message_type: type[Parsed], payload: bytes) -> Parsed:
    """Raises Invalid."""
    try:
        return message_type.FromString(payload)
    except DecodeError as error:
        raise Invalid(f"malformed {message_type.__name__}") from error


def handshake_proof(secret: str, speaker: str, service: str, nonces: bytes) -> bytes:
    """That ``speaker`` ("client" or "server") knows the secret, without telling it. ``nonces``: the
    client's, then the server's, so that nothing that was heard can be said again."""
    said = f"baton line {VERSION} {speaker} {service} ".encode() + nonces
    return hmac.digest(secret.encode(), said, "sha256")
