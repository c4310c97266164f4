"""A framed connection between two programs, over its own TCP connection or, within a host, a Unix
socket. It carries one stream of messages, or calls (:mod:`baton.rpc.framed.calls`).

A gRPC stream costs its Python side some 0.1 ms per message, and a polling thread; a frame costs a
few microseconds. So what is frequent uses framed connections: the stream ``Worker.Run``, whose
requests are cancelled when it ends, the calls of a conductor, and a store's calls within its host.

Baton has a protocol of its own because the gRPC library for Python took half of the router's CPU
time per request: framed connections save 0.6 to 1 ms per request with 16 tokens
(docs/decisions/07-wires.md; docs/results/router.md compares the router with others).

Both ends of a TCP connection ping a peer that is silent. The kernel of a frozen process still
acknowledges segments, so only an answer from the peer's event loop shows that it is alive.
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
"""Maximum size of a frame before its sender is authenticated."""

CLOSE_SECONDS = 2.0
"""Time for a peer to read why it is refused."""

Parsed = TypeVar("Parsed", bound=Message)

MessageHandler = Callable[[bytes], None]
"""Called with each message. Raises BatonError for an invalid one; then the peer is refused."""

CallHandler = Callable[[int, int, bytes], None]
"""Called with the number, kind and payload of each frame of a call. Raises BatonError for an
invalid one; then the peer is refused."""

log = structlog.get_logger(__name__)


class FrameKind(IntEnum):
    """Kinds of frames. HELLO, CHALLENGE, PROOF and WELCOME, in this order, are the handshake. Kinds
    from FIRST_METHOD on are calls."""

    MESSAGE = 1
    PING = 2
    PONG = 3
    REFUSAL = 4  # the last frame
    HELLO = 5
    CHALLENGE = 6
    PROOF = 7
    WELCOME = 8
    ANSWER = 9
    ERROR = 10


FIRST_METHOD = 16


class FramedConnection(FrameProtocol):
    """One end of a framed connection. It is opened by a handshake (:mod:`baton.rpc.framed.client`,
    :mod:`baton.rpc.framed.server`), and ends with :meth:`on_lost`, which is called once.

    After each tick of ``tick_seconds`` in which nothing was received, the peer is pinged (never if
    that is 0: over a Unix socket, the kernel tells of a peer's death, and a call has a deadline).
    After more than ``max_silent_ticks`` such ticks in a row, it is considered lost. Ticks are
    counted rather than seconds: between two ticks, this event loop reads everything that has
    arrived, so a process that was itself frozen does not consider its peers lost."""

    def __init__(self, tick_seconds: float, max_silent_ticks: int) -> None:
        super().__init__()
        self.max_payload_bytes = HANDSHAKE_BYTES
        self._tick_seconds = tick_seconds
        self._max_silent_ticks = max_silent_ticks
        self._handle_message: MessageHandler | None = None  # set by the handshake
        self.handle_call: CallHandler | None = None
        self._has_received = True
        self._num_silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None  # while the peer does not read
        self.has_ended = False

    # -- for its user -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the handshake was completed."""
        return self._handle_message is not None

    def send_message(self, payload: bytes) -> None:
        self.send(0, FrameKind.MESSAGE, payload)

    async def wait_until_writable(self) -> None:
        """Return at once if there is room in the write buffer. Otherwise wait until the peer has
        read enough of what was sent, or the connection has ended. Only one task may wait."""
        if self._writable is not None:
            await self._writable

    def refuse(self, error: BatonError) -> None:
        """Send the error to the peer, and end the connection."""
        if self.has_ended or self.transport is None:
            return
        self.send(0, FrameKind.REFUSAL, error_to_proto(error).SerializeToString())
        self.transport.close()
        self._start_timer(CLOSE_SECONDS, self.close)
        self._end(error)

    def lose(self, error: BatonError) -> None:
        """End the connection at once."""
        self.close()
        self._end(error)

    def _end(self, failure: BatonError) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.resume_writing()
            self.on_lost(failure)

    # -- for subclasses ---------------------------------------------------------------------

    def on_handshake(self, kind: int, payload: bytes) -> None:
        """Handle a frame of the handshake. Raises BatonError for an invalid frame; the peer is then
        refused."""
        raise NotImplementedError

    def on_lost(self, failure: BatonError) -> None:
        raise NotImplementedError

    def complete_handshake(self, handle_message: MessageHandler) -> None:
        """Complete the handshake. Call this once the peer is authenticated; ``handle_message`` is
        then called with each of its messages."""
        self._handle_message = handle_message
        self.max_payload_bytes = MAX_MESSAGE_BYTES
        self._stop_timer()
        if self._tick_seconds:
            self._start_timer(self._tick_seconds, self._tick)

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # the socket may be broken already, or a Unix socket
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Handle each frame. A frame that can't be handled ends the connection."""
        self._has_received = True
        for number, kind, payload in self.split_frames(data):
            try:
                if kind == FrameKind.MESSAGE and self._handle_message is not None:
                    self._handle_message(payload)
                else:
                    self._on_control(number, kind, payload)
            except BatonError as error:
                self.refuse(error)
            except Exception:  # a bug, which must end only this connection
                log.exception("framed_connection_crashed")
                self.refuse(BatonError("internal error"))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        reason = f"the connection broke: {error}" if error is not None else "the stream ended"
        self._end(Unavailable(reason))

    # -- frames -----------------------------------------------------------------------------

    def _on_control(self, number: int, kind: int, payload: bytes) -> None:
        """Handle a frame that is not a message. Raises BatonError for an invalid frame; the peer is
        then refused."""
        if kind == FrameKind.REFUSAL:
            self.lose(error_from_proto(parse_message(pb.Refusal, payload)))
        elif not self.is_open:
            self.on_handshake(kind, payload)
        elif kind >= FrameKind.ANSWER and self.handle_call is not None:
            self.handle_call(number, kind, payload)
        elif kind == FrameKind.PING:
            self.send(0, FrameKind.PONG, b"")
        elif kind != FrameKind.PONG:
            raise Invalid(f"frames of kind {kind} are not allowed after the handshake")

    def on_too_large(self, size_bytes: int) -> None:
        limit = self.max_payload_bytes
        self.refuse(Invalid(f"a frame has {size_bytes} bytes: at most {limit} are allowed"))

    def on_write_buffer_full(self) -> None:
        self.lose(Unavailable("the peer left too much data unread"))

    # -- liveness ---------------------------------------------------------------------------

    def _tick(self) -> None:
        self._num_silent_ticks = 0 if self._has_received else self._num_silent_ticks + 1
        self._has_received = False
        if self._num_silent_ticks > self._max_silent_ticks:
            seconds = self._num_silent_ticks * self._tick_seconds
            self.lose(Unresponsive(f"the peer has been silent for {seconds:.1f} s"))
            return
        if self._num_silent_ticks:
            self.send(0, FrameKind.PING, b"")
        self._start_timer(self._tick_seconds, self._tick)

    def _start_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def parse_message(message_type: type[Parsed], payload: bytes) -> Parsed:
    """Parse a message. Raises Invalid if it is malformed."""
    try:
        return message_type.FromString(payload)
    except DecodeError as error:
        raise Invalid(f"the received message is a malformed {message_type.__name__}") from error


def handshake_proof(secret: str, speaker: str, service: str, nonces: bytes) -> bytes:
    """Return a proof that ``speaker`` ("client" or "server") knows the secret. ``nonces`` is the
    client's nonce followed by the server's; they make an intercepted proof useless in any other
    handshake."""
    claim = f"baton line {VERSION} {speaker} {service} ".encode() + nonces
    return hmac.digest(secret.encode(), claim, "sha256")
