"""TCP connections of simulated processes, as asyncio shows them to its protocols.

Bytes arrive once and in order, late, cut anywhere, and several writes may be read at once. A peer
that does not read fills its kernel's room, then the writer's buffer, and the writer is told to
pause. A kernel takes bytes for a frozen process, and connections too; it answers for a dead one,
unless its machine died with it. A connection may break anywhere, also within a frame, or go silent
without a word to either end.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.whole.process import Process

if TYPE_CHECKING:
    from tests.sim.whole.network import Network

SPLIT, LATE_READ = 0.08, 0.06
"""How likely a write is sent in two pieces, a read takes only a part, and a read waits for what
comes with it."""

TIGHT = 0.2
"""How likely a connection has little room."""

HANDSHAKE_BYTES = 50
"""Either end sends more while they shake hands."""

ROOM_BYTES = 64 * 1024
"""That a kernel holds of what nobody has read, and that a writer's buffer holds before it is told
to pause."""

MAX_PAST_PAUSE_BYTES = 500
"""That a router writes to a client after it was told to pause: what it was about to."""

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class SimFile:
    """Stands for the socket that a transport shows."""

    def setsockopt(self, *option: Any) -> None:
        """Nothing is to be set."""

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 2


FILE = SimFile()


class SimSocket(asyncio.Transport):
    """One end of a connection. ``over``: its process has seen the end of it."""

    __slots__ = (
        "_arrived",
        "_broken",
        "_closing",
        "_ended",
        "_fuse",
        "_held_until",
        "_high",
        "_is_due",
        "_last_at",
        "_past_pause",
        "_paused",
        "_reading",
        "_room",
        "_unsent",
        "is_client",
        "kind",
        "network",
        "over",
        "peer",
        "process",
        "protocol",
        "silent",
    )

    def __init__(self, network: "Network", process: Process, kind: str, is_client: bool) -> None:
        chance = network.chance
        tight = chance.happens(TIGHT)
        self.network = network
        self.process = process
        self.kind = kind
        self.is_client = is_client
        self.peer: SimSocket
        self.protocol: Any = None
        self.over = False
        self.silent = False  # nothing leaves here any more, and nobody is told
        self._room = chance.between(60, 600) if tight else ROOM_BYTES
        self._high = chance.between(0, 400) if tight else ROOM_BYTES
        self._unsent = bytearray()
        self._arrived = bytearray()
        self._reading = False
        self._is_due = False
        self._paused = False
        self._past_pause = 0
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._fuse: int | None = None
        self._held_until = 0.0
        self._last_at = 0.0
        process.sockets[self] = None

    def begin(self, protocol: Any) -> None:
        """The process has it."""
        if self.over:
            return
        self.protocol = protocol
        self._reading = True
        protocol.connection_made(self)
        self._wake_later()

    # -- what asyncio asks of a transport --------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return FILE if name == "socket" else default

    def is_closing(self) -> bool:
        return self._closing or self.over

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: Any) -> None:
        if self._closing or self.over or not data:
            return
        if self._broken is not None:
            self.network.loop.call_soon(self._lose, self._broken, context=self.process.context)
            return
        if not self._unsent and len(data) <= self._room:
            self._emit(data)
            return
        if self._paused and self.kind == "http":
            self._note_past_pause(len(data))
        self._unsent += data
        self._fill()
        if len(self._unsent) > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def _note_past_pause(self, num_bytes: int) -> None:
        """A client that does not read costs a bounded amount of memory."""
        self._past_pause += num_bytes
        assert self._past_pause <= MAX_PAST_PAUSE_BYTES, "it is written to, and does not read"

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not (self._reading or self._closing or self.over):
            self._reading = True
            self._wake_later()

    def close(self) -> None:
        """After what was written has gone out."""
        if not (self._closing or self.over):
            self._closing, self._reading = True, False
            if not self._unsent:
                self._finish()

    def abort(self) -> None:
        if not self.over:
            had_closed = self._closing and not self._unsent
            self._unsent.clear()
            self._closing, self._reading = True, False
            if not had_closed:
                self._finish()

    # -- what the network does -------------------------------------------------------------

    def tear(self, num_bytes: int) -> None:
        """It breaks once so many bytes more have been sent from here."""
        self._fuse = num_bytes

    def reset(self, error: Exception) -> None:
        """This end learns in its own time that it has broken."""
        self._post_here(self.network.loop.time() + self.network.chance.number() ** 3, error)

    def hush(self) -> None:
        """Nothing passes any more, and neither end is told."""
        self.silent = self.peer.silent = True

    def hold(self, seconds: float) -> None:
        """Nobody reads here for so long."""
        loop = self.network.loop
        self._held_until = loop.time() + seconds
        loop.call_later(seconds, self._wake, context=self.network.context)

    def release(self) -> None:
        self._held_until = 0.0
        self._fuse = None

    def die(self, is_told: bool) -> None:
        """Its process is dead; the peer learns it from the kernel, if that lives."""
        if self.over:
            return
        if is_told:
            self._post(SimSocket._arrive_end, self._farewell())
        else:
            self.hush()
        self.network.loop.call_soon(
            self._lose, ConnectionResetError("dead"), context=self.process.context
        )

    @property
    def is_orphan(self) -> bool:
        """Its peer is no more, and it does not know."""
        return not self.over and (self.peer.over or not self.peer.process.alive)

    # -- out -------------------------------------------------------------------------------

    def _emit(self, data: Any) -> None:
        self._room -= len(data)
        if self.silent:
            return
        if self._fuse is not None:
            self._fuse -= len(data)
            if self._fuse < 0:
                self._blow(bytes(data[: self._fuse]))
                return
        chance = self.network.chance
        if chance.happens(SPLIT) and len(data) > 1:
            cut = chance.between(1, len(data) - 1)
            self._post(SimSocket._arrive, data[:cut])
            data = data[cut:]
        self._post(SimSocket._arrive, bytes(data))

    def _blow(self, data: bytes) -> None:
        if data:
            self._post(SimSocket._arrive, data)
        self._fuse = None
        self._post(SimSocket._arrive_end, ConnectionResetError("reset within a frame"))
        self.reset(ConnectionResetError("reset within a frame"))
        self.silent = True

    def _post(self, what: Callable[..., None], item: Any) -> None:
        if self.silent:
            return
        network, peer = self.network, self.peer
        self._last_at = max(network.arrival(self.process, peer.process), self._last_at)
        network.loop.call_at(self._last_at, what, peer, item, context=network.context)

    def _fill(self) -> None:
        """As much as the peer's kernel has room for."""
        while self._unsent and self._room > 0:
            data = bytes(self._unsent[: self._room])
            del self._unsent[: len(data)]
            self._emit(data)

    def _flush(self) -> None:
        """There is room again."""
        if self.over:
            return
        self._fill()
        if self._paused and len(self._unsent) <= self._high // 4:
            self._paused, self._past_pause = False, 0
            self.network.loop.call_soon(self._resume, context=self.process.context)
        if self._closing and not self._unsent:
            self._finish()

    def _resume(self) -> None:
        if not (self.over or self._paused):
            self.protocol.resume_writing()

    def _was_read(self, num_bytes: int) -> None:
        self._room += num_bytes
        if self._unsent and not self.silent:
            self.network.loop.call_soon(self._flush, context=self.network.context)

    def _finish(self) -> None:
        """The kernel says goodbye, and the process has seen the last of it."""
        if self.process.alive:
            self._post(SimSocket._arrive_end, self._farewell())
        self.network.loop.call_soon(self._lose, None, context=self.process.context)

    def _farewell(self) -> Exception | None:
        """Whoever leaves something unread resets."""
        return ConnectionResetError("reset by peer") if self._arrived else None

    # -- in --------------------------------------------------------------------------------

    def _arrive(self, data: bytes) -> None:
        if self.over:
            self._post(SimSocket._arrive_end, ConnectionResetError("reset by peer"))
        elif not self._ended:
            self._arrived += data
            self._wake()

    def _arrive_end(self, error: Exception | None) -> None:
        if self.over or self._broken is not None:
            return
        self._ended, self._broken = True, error
        if error is not None and (self._closing or self.network.chance.happens(0.5)):
            self._arrived.clear()
        self._wake()

    def _wake(self) -> None:
        """Not from the process itself."""
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
        if self.over or self.protocol is None:
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
        if self.over:
            return
        self.over = True
        self._unsent.clear()
        self.process.sockets.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)


class SimServer:
    """What ``create_server`` returns."""

    def __init__(self, network: "Network", address: str, listener: "Listener") -> None:
        self._network = network
        self._address = address
        self._listener = listener
        self.sockets = [FILE]

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self._listener:
            del self._network.listeners[self._address]


class Listener:
    """Who takes connections at an address."""

    def __init__(self, process: Process, factory: ProtocolFactory) -> None:
        self.process = process
        self.factory = factory


class Wall:
    """What a firewall does with connections to an address: refuses or swallows them."""

    REFUSES, SWALLOWS = "refuses", "swallows"


class Dial:
    """One connection that is about to be."""

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
        """The transport and its protocol. Raises OSError."""
        network = self._network
        if not self._source.alive:
            raise ConnectionResetError("nothing leaves a dead process")
        listener = network.listeners.get(self._address)
        target = listener.process if listener is not None else None
        at = network.arrival(self._source, target)
        network.loop.call_at(at, self._knock, context=network.context)
        return await self._answer

    def _knock(self) -> None:
        network = self._network
        listener = network.listeners.get(self._address)
        wall = network.walls.get(self._address)
        if wall == Wall.SWALLOWS:
            return
        if listener is None or not listener.process.alive or wall == Wall.REFUSES:
            if listener is None or not listener.process.vanished:
                self._come(self._refuse, None, None)
            return
        near = SimSocket(network, self._source, self._kind, is_client=True)
        far = SimSocket(network, listener.process, self._kind, is_client=False)
        near.peer, far.peer = far, near
        self._shake(near, far)
        network.loop.call_soon(
            self._accept, far, listener.factory, context=listener.process.context
        )
        self._come(self._open, near, listener.process)

    def _shake(self, near: SimSocket, far: SimSocket) -> None:
        """While connections are shaken, many end within their handshake."""
        network = self._network
        if self._kind == "line" and network.loop.time() < network.shaken_until:
            chance = network.chance
            end = far if chance.happens(0.5) else near
            luck = chance.number()
            if luck < 0.5:
                end.tear(chance.below(HANDSHAKE_BYTES))
            elif luck < 0.75:
                end.hush()

    def _come(self, what: Callable[..., None], item: Any, target: Process | None) -> None:
        at = self._network.arrival(target, self._source)
        self._network.loop.call_at(at, what, item, context=self._source.context)

    def _accept(self, far: SimSocket, factory: ProtocolFactory) -> None:
        if not far.over and far.process.alive:
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
