"""TCP connections of simulated processes, with asyncio's transport interface.

Bytes arrive once and in order, possibly late and split anywhere, and one read may return several
writes. If a peer does not read, first its kernel's receive buffer fills up, then the writer's send
buffer; then the writer is paused. The kernel accepts bytes and connections for a frozen process,
and resets the connections of a dead process unless its machine died, too. A connection may break
anywhere, even within a frame, or go silent without notice to either end.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.whole.process import Process

if TYPE_CHECKING:
    from tests.sim.whole.network import Network

SPLIT, LATE_READ = 0.08, 0.06
"""SPLIT is the probability that a write is sent in two pieces, and that a read returns only a part.
LATE_READ is the probability that a read waits for further data."""

SMALL_BUFFERS = 0.2
"""The probability that a connection has small buffers."""

HANDSHAKE_BYTES = 50
"""A number of bytes that is smaller than what either end sends during the handshake."""

BUFFER_BYTES = 64 * 1024
"""The size of the kernel's receive buffer, and of the send buffer above which a writer is paused.
"""

MAX_PAST_PAUSE_BYTES = 500
"""The maximum number of bytes that a router may write to a client after it was paused: the event
that it is writing at that moment."""

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class SimFile:
    """Stands in for the socket that a transport returns from ``get_extra_info("socket")``. It
    ignores options, and returns fixed addresses."""

    def setsockopt(self, *option: Any) -> None:
        """Ignore the option."""

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 2


FILE = SimFile()


class SimSocket(asyncio.Transport):
    """One end of a connection. ``is_over`` is set once this end's process has seen the end of the
    connection."""

    __slots__ = (
        "_arrived",
        "_broken",
        "_bytes_until_break",
        "_closing",
        "_ended",
        "_held_until",
        "_high_water_bytes",
        "_is_due",
        "_last_at",
        "_past_pause",
        "_paused",
        "_peer_buffer_bytes",
        "_reading",
        "_unsent",
        "is_client",
        "is_over",
        "kind",
        "network",
        "peer",
        "process",
        "protocol",
        "silent",
    )

    def __init__(self, network: "Network", process: Process, kind: str, is_client: bool) -> None:
        chance = network.chance
        tight = chance.happens(SMALL_BUFFERS)
        self.network = network
        self.process = process
        self.kind = kind
        self.is_client = is_client
        self.peer: SimSocket
        self.protocol: Any = None
        self.is_over = False
        self.silent = False  # nothing is sent any more, and neither end is notified
        self._peer_buffer_bytes = chance.between(60, 600) if tight else BUFFER_BYTES
        self._high_water_bytes = chance.between(0, 400) if tight else BUFFER_BYTES
        self._unsent = bytearray()
        self._arrived = bytearray()
        self._reading = False
        self._is_due = False
        self._paused = False
        self._past_pause = 0
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._bytes_until_break: int | None = None
        self._held_until = 0.0
        self._last_at = 0.0
        process.sockets[self] = None

    def begin(self, protocol: Any) -> None:
        """Attach the process's protocol to this end."""
        if self.is_over:
            return
        self.protocol = protocol
        self._reading = True
        protocol.connection_made(self)
        self._wake_later()

    # -- the interface of an asyncio transport ---------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return FILE if name == "socket" else default

    def is_closing(self) -> bool:
        return self._closing or self.is_over

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: Any) -> None:
        if self._closing or self.is_over or not data:
            return
        if self._broken is not None:
            self.network.loop.call_soon(self._lose, self._broken, context=self.process.context)
            return
        if not self._unsent and len(data) <= self._peer_buffer_bytes:
            self._emit(data)
            return
        if self._paused and self.kind == "http":
            self._note_past_pause(len(data))
        self._unsent += data
        self._fill()
        if len(self._unsent) > self._high_water_bytes and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def _note_past_pause(self, num_bytes: int) -> None:
        """Count the bytes that were written since writing was paused, and check that they are few,
        so that a client which does not read takes little memory."""
        self._past_pause += num_bytes
        assert self._past_pause <= MAX_PAST_PAUSE_BYTES, (
            "the router wrote too much after it was paused"
        )

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not (self._reading or self._closing or self.is_over):
            self._reading = True
            self._wake_later()

    def close(self) -> None:
        """Close the connection once everything that was written has been sent."""
        if not (self._closing or self.is_over):
            self._closing, self._reading = True, False
            if not self._unsent:
                self._finish()

    def abort(self) -> None:
        if not self.is_over:
            had_closed = self._closing and not self._unsent
            self._unsent.clear()
            self._closing, self._reading = True, False
            if not had_closed:
                self._finish()

    # -- faults ----------------------------------------------------------------------------

    def break_after(self, num_bytes: int) -> None:
        """Break the connection after this end has sent ``num_bytes`` more bytes."""
        self._bytes_until_break = num_bytes

    def reset(self, error: Exception) -> None:
        """Break the connection at this end, after a random delay."""
        self._post_here(self.network.loop.time() + self.network.chance.number() ** 3, error)

    def silence(self) -> None:
        """Drop all data from now on, without notifying either end."""
        self.silent = self.peer.silent = True

    def stop_reading(self, seconds: float) -> None:
        """Stop reading at this end for ``seconds``."""
        loop = self.network.loop
        self._held_until = loop.time() + seconds
        loop.call_later(seconds, self._wake, context=self.network.context)

    def release(self) -> None:
        self._held_until = 0.0
        self._bytes_until_break = None

    def die(self, notifies_peer: bool) -> None:
        """End the connection of a dead process. If ``notifies_peer`` is set, its kernel notifies
        the peer."""
        if self.is_over:
            return
        if notifies_peer:
            self._post(SimSocket._arrive_end, self._end_for_peer())
        else:
            self.silence()
        self.network.loop.call_soon(
            self._lose, ConnectionResetError("dead"), context=self.process.context
        )

    @property
    def is_orphan(self) -> bool:
        """Whether the peer is gone but this end does not know that yet."""
        return not self.is_over and (self.peer.is_over or not self.peer.process.alive)

    # -- sending -----------------------------------------------------------------------------

    def _emit(self, data: Any) -> None:
        self._peer_buffer_bytes -= len(data)
        if self.silent:
            return
        if self._bytes_until_break is not None:
            self._bytes_until_break -= len(data)
            if self._bytes_until_break < 0:
                self._break_within(bytes(data[: self._bytes_until_break]))
                return
        chance = self.network.chance
        if chance.happens(SPLIT) and len(data) > 1:
            cut = chance.between(1, len(data) - 1)
            self._post(SimSocket._arrive, data[:cut])
            data = data[cut:]
        self._post(SimSocket._arrive, bytes(data))

    def _break_within(self, data: bytes) -> None:
        """Break the connection within a frame: send ``data``, the part of the frame that comes
        before the break, and then a reset."""
        if data:
            self._post(SimSocket._arrive, data)
        self._bytes_until_break = None
        self._post(SimSocket._arrive_end, ConnectionResetError("reset within a frame"))
        self.reset(ConnectionResetError("reset within a frame"))
        self.silent = True

    def _post(self, method: Callable[..., None], item: Any) -> None:
        """Call ``method`` on the peer's end at the time when data sent now arrives."""
        if self.silent:
            return
        network, peer = self.network, self.peer
        self._last_at = max(network.arrival_time(self.process, peer.process), self._last_at)
        network.loop.call_at(self._last_at, method, peer, item, context=network.context)

    def _fill(self) -> None:
        """Send as much as the peer's receive buffer has space for."""
        while self._unsent and self._peer_buffer_bytes > 0:
            data = bytes(self._unsent[: self._peer_buffer_bytes])
            del self._unsent[: len(data)]
            self._emit(data)

    def _flush(self) -> None:
        """Send more, because the peer's receive buffer has space again."""
        if self.is_over:
            return
        self._fill()
        if self._paused and len(self._unsent) <= self._high_water_bytes // 4:
            self._paused, self._past_pause = False, 0
            self.network.loop.call_soon(self._resume, context=self.process.context)
        if self._closing and not self._unsent:
            self._finish()

    def _resume(self) -> None:
        if not (self.is_over or self._paused):
            self.protocol.resume_writing()

    def _was_read(self, num_bytes: int) -> None:
        self._peer_buffer_bytes += num_bytes
        if self._unsent and not self.silent:
            self.network.loop.call_soon(self._flush, context=self.network.context)

    def _finish(self) -> None:
        """Send the end of the connection, and tell the process that the connection is closed."""
        if self.process.alive:
            self._post(SimSocket._arrive_end, self._end_for_peer())
        self.network.loop.call_soon(self._lose, None, context=self.process.context)

    def _end_for_peer(self) -> Exception | None:
        """Return how the connection ends for the peer: with a reset if data was left unread, or
        with None for an orderly end."""
        return ConnectionResetError("reset by peer") if self._arrived else None

    # -- receiving ---------------------------------------------------------------------------

    def _arrive(self, data: bytes) -> None:
        if self.is_over:
            self._post(SimSocket._arrive_end, ConnectionResetError("reset by peer"))
        elif not self._ended:
            self._arrived += data
            self._wake()

    def _arrive_end(self, error: Exception | None) -> None:
        if self.is_over or self._broken is not None:
            return
        self._ended, self._broken = True, error
        if error is not None and (self._closing or self.network.chance.happens(0.5)):
            self._arrived.clear()
        self._wake()

    def _wake(self) -> None:
        """Deliver arrived bytes, or the end of the connection, to the process's protocol. Code that
        the protocol may have called uses :meth:`_wake_later` instead, since the protocol must not
        be re-entered."""
        network = self.network
        if self._is_due or not self._may_read:
            return
        if self.process.frozen or network.chance.happens(LATE_READ):
            self._wake_later()
        else:
            self.process.context.run(self._read)

    def _wake_later(self) -> None:
        if not self._is_due and self._may_read:
            self._is_due = True
            self.network.loop.call_soon(self._read, context=self.process.context)

    @property
    def _may_read(self) -> bool:
        if self.is_over or self.protocol is None:
            return False
        if self._broken is not None and not self._arrived:
            return True
        is_held = self._held_until > self.network.loop.time()
        return self._reading and not is_held and (bool(self._arrived) or self._ended)

    def _read(self) -> None:
        self._is_due = False
        if not self._may_read:
            return
        if self._arrived:
            data, chance = bytes(self._arrived), self.network.chance
            if len(data) > 1 and chance.happens(SPLIT):
                data = data[: chance.between(1, len(data) - 1)]
            del self._arrived[: len(data)]
            if not self.silent:
                self.peer._was_read(len(data))
            self.protocol.data_received(data)
            if self._arrived or self._ended:
                self._wake_later()
        elif self._broken is not None:
            self._lose(self._broken)
        elif not self.protocol.eof_received():
            self.close()

    def _post_here(self, at: float, error: Exception) -> None:
        self.network.loop.call_at(at, self._lose, error, context=self.process.context)

    def _lose(self, error: Exception | None) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._unsent.clear()
        self.process.sockets.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)


class SimServer:
    """The server object that ``create_server`` returns."""

    def __init__(self, network: "Network", address: str, listener: "Listener") -> None:
        self._network = network
        self._address = address
        self._listener = listener
        self.sockets = [FILE]

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self._listener:
            del self._network.listeners[self._address]


class Listener:
    """The process and protocol factory that accept connections at an address."""

    def __init__(self, process: Process, factory: ProtocolFactory) -> None:
        self.process = process
        self.factory = factory


class Firewall:
    """The two ways in which a firewall treats connections to an address: it refuses them, or
    silently drops them."""

    REFUSES, SWALLOWS = "refuses", "swallows"


class ConnectAttempt:
    """An attempt to connect to an address."""

    def __init__(
        self,
        network: "Network",
        source: Process,
        factory: ProtocolFactory,
        address: str,
        kind: str,
    ) -> None:
        self._network = network
        self._source = source
        self._factory = factory
        self._address = address
        self._kind = kind
        self._answer: asyncio.Future[Any] = network.loop.create_future()

    async def connect(self) -> Any:
        """Connect; return the transport and its protocol. Raises OSError."""
        network = self._network
        if not self._source.alive:
            raise ConnectionResetError("the calling process is dead")
        listener = network.listeners.get(self._address)
        target = listener.process if listener is not None else None
        at = network.arrival_time(self._source, target)
        network.loop.call_at(at, self._reach_server, context=network.context)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._close_if_open()
            raise

    def _close_if_open(self) -> None:
        """Close a connection that was opened just before the connecting task was cancelled. The
        task never gets the connection, and real event loops close it in this case, too."""
        opened = self._answer
        if opened.done() and not opened.cancelled() and opened.exception() is None:
            near, _ = opened.result()
            near.abort()

    def _reach_server(self) -> None:
        network = self._network
        listener = network.listeners.get(self._address)
        wall = network.firewalls.get(self._address)
        if wall == Firewall.SWALLOWS:
            return
        if listener is None or not listener.process.alive or wall == Firewall.REFUSES:
            if listener is None or not listener.process.vanished:
                self._reply(self._refuse, None, None)
            return
        near = SimSocket(network, self._source, self._kind, is_client=True)
        far = SimSocket(network, listener.process, self._kind, is_client=False)
        near.peer, far.peer = far, near
        self._disturb_handshake(near, far)
        network.loop.call_soon(
            self._accept, far, listener.factory, context=listener.process.context
        )
        self._reply(self._open, near, listener.process)

    def _disturb_handshake(self, near: SimSocket, far: SimSocket) -> None:
        """Break or silence many of the framed connections that are opened before
        ``Network.handshake_faults_until``."""
        network = self._network
        if self._kind == "line" and network.loop.time() < network.handshake_faults_until:
            chance = network.chance
            end = far if chance.happens(0.5) else near
            draw = chance.number()
            if draw < 0.5:
                end.break_after(chance.below(HANDSHAKE_BYTES))
            elif draw < 0.75:
                end.silence()

    def _reply(self, callback: Callable[..., None], item: Any, target: Process | None) -> None:
        """Call ``callback`` in the connecting process when the target's reply arrives."""
        at = self._network.arrival_time(target, self._source)
        self._network.loop.call_at(at, callback, item, context=self._source.context)

    def _accept(self, far: SimSocket, factory: ProtocolFactory) -> None:
        if not far.is_over and far.process.alive:
            far.begin(factory())

    def _refuse(self, _: None) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectionRefusedError("connection refused"))

    def _open(self, near: SimSocket) -> None:
        if self._answer.done() or not self._source.alive:
            near.abort()
            return
        protocol = self._factory()
        near.begin(protocol)
        self._answer.set_result((near, protocol))
