"""The network between simulated processes. It carries TCP connections
(:mod:`tests.sim.whole.sockets`), ordered streams and unary calls like those of gRPC, and injects
faults into all of them.

A stream behaves like a gRPC stream over TCP: messages arrive once, in order and possibly late. If
the stream breaks, each end learns of this at its own time. A partition delays all messages, and
breaks streams once keep-alives are missed. A dead process refuses connections; a frozen process
accepts them but sends nothing.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import ConnectAttempt, Listener, ProtocolFactory, SimServer, SimSocket

T = TypeVar("T")

CLIENT_KEEPALIVE = (1.4, 2.4)
SERVER_KEEPALIVE = (5.0, 10.0)
"""The seconds after which a client or a server gives up on a silent peer, as configured in
``baton.rpc.channel`` and ``baton.rpc.server``."""

USUAL_SECONDS = 0.001
LATE_SECONDS = 0.06


class Server(Protocol):
    """An object that listens at an address. A function that is given to :meth:`Network.call` gets
    this object as its argument."""

    def accept(self, kind: str, opening: Any, end: "StreamEnd") -> None: ...


class StreamEnd:
    """One end of a stream. Messages that arrive are passed to ``on_message`` or, if that is None,
    wait for :meth:`get`."""

    __slots__ = (
        "_early",
        "_inbox",
        "_last_at",
        "_over",
        "_waiter",
        "connected",
        "failure",
        "is_client",
        "network",
        "on_break",
        "on_message",
        "peer",
        "process",
    )

    def __init__(self, network: "Network", process: Process, is_client: bool) -> None:
        self.is_client = is_client
        self.network = network
        self.process = process
        self.peer: StreamEnd | None = None
        self.failure: BatonError | None = None
        self.on_message: Callable[[Any], None] | None = None
        self.on_break: Callable[[], object] | None = None
        self.connected: asyncio.Future[None] | None = None
        self._early: list[Any] = []
        self._inbox: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] | None = None
        self._last_at = 0.0
        process.ends[self] = None

    def send(self, message: Any) -> None:
        """Send a message. If the stream breaks, the message is lost, as if it had still been in a
        buffer."""
        if self.failure is not None or not self.process.alive:
            return
        if self.peer is None:
            self._early.append(message)
        else:
            self._post(StreamEnd._receive, message)

    def close(self, error: BatonError | None = None) -> None:
        """End the stream. The peer gets the messages that were sent before, and then ``error`` or,
        if that is None, a plain end of the stream."""
        if self.failure is None and self.process.alive and self.peer is not None:
            self._post(StreamEnd.break_off, error or Unavailable("the stream ended"))
        self.break_off(Unavailable("the stream was closed at this end"))

    def lose(self, error: BatonError) -> None:
        """Give up the stream at this end. The peer learns of this if messages still reach it."""
        if self.failure is None and self.process.alive and self.peer is not None:
            self._post(StreamEnd.break_off, Unavailable("the peer gave up"))
        self.break_off(error)

    async def get(self) -> Any:
        """Return the next message. After the last one, raise the error that ended the stream, which
        is Unavailable if the stream ended normally."""
        while not self._inbox:
            if self.failure is not None:
                raise self.failure
            self._waiter = self.network.loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def wait_until_over(self) -> None:
        """Wait until this end knows that the stream has broken or ended."""
        while self.failure is None:
            self._over = self._over or self.network.loop.create_future()
            await asyncio.wait([self._over])

    def break_off(self, error: BatonError) -> None:
        """End the stream at this end only."""
        if self.failure is not None:
            return
        self.failure = error
        self.process.ends.pop(self, None)
        if self.connected is not None and not self.connected.done():
            self.connected.set_exception(error)
            self.connected.exception()
        self._wake()
        if self._over is not None:
            self._over.set_result(None)
        if self.on_break is not None:
            self.on_break()

    def attach_peer(self, peer: "StreamEnd") -> None:
        """Attach the peer's end, and send it the messages that have waited for it."""
        self.peer = peer
        for message in self._early:
            self._post(StreamEnd._receive, message)

    def mark_connected(self, _: object = None) -> None:
        """Mark the stream as connected, because the peer has answered."""
        if self.connected is not None and not self.connected.done():
            self.connected.set_result(None)

    def _post(self, method: "Callable[[StreamEnd, Any], None]", item: Any) -> None:
        """Call ``method`` on the peer's end at the time when a message sent now arrives."""
        peer = self.peer
        assert peer is not None
        self._last_at = max(self.network.arrival_time(self.process, peer.process), self._last_at)
        self.network.loop.call_at(self._last_at, method, peer, item, context=peer.process.context)

    def _receive(self, message: Any) -> None:
        if self.failure is not None or not self.process.alive:
            self._refuse()
        elif self.on_message is not None:
            self.on_message(message)
        else:
            self._inbox.append(message)
            self._wake()

    def _refuse(self) -> None:
        """Reset the peer's end, because this end no longer reads. If this process is alive, the
        reset arrives after everything that this end sent before. So if this end was closed
        normally, the peer sees the normal end of the stream and not the reset."""
        peer = self.peer
        if peer is not None and peer.failure is None:
            at = self.network.arrival_time(self.process, peer.process)
            at = max(at, self._last_at) if self.process.alive else at
            reset = Unavailable("connection reset")
            self.network.loop.call_at(at, peer.break_off, reset, context=peer.process.context)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Call:
    """A unary call that waits for its response."""

    __slots__ = ("answer", "source", "task")

    def __init__(self, source: Process, answer: "asyncio.Future[Any]") -> None:
        self.source = source
        self.answer = answer
        self.task: asyncio.Task[Any] | None = None

    def give_up(self) -> None:
        """Cancel the call at the server, because the caller no longer waits."""
        if self.task is not None:
            self.task.cancel()

    def settle(self, value: Any, error: BatonError | None) -> None:
        if self.answer.done() or not self.source.alive:
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class Network:
    """Carries all connections, streams and calls of a run, and injects faults into them."""

    def __init__(self, loop: SimLoop, chance: SeededRandom) -> None:
        self.loop = loop
        self.chance = chance
        self.slowness = 1.0
        self.context = copy_context()
        """The context for callbacks that belong to no simulated process."""
        self.processes: list[Process] = []
        self.listeners: dict[str, Listener] = {}
        self.firewalls: dict[str, str] = {}
        """What a firewall does with new connections (:class:`tests.sim.whole.sockets.Firewall`), by
        address."""
        self.handshake_faults_until = 0.0
        """Until this time, new framed connections may break during their handshake."""
        self._servers: dict[str, tuple[Process, Any]] = {}
        self._healed_at: dict[tuple[str, str], float] = {}
        loop.network = self

    def listen(self, process: Process, address: str, server: Any) -> None:
        self._servers[address] = (process, server)

    def find(self, address: str) -> tuple[Process, Any] | None:
        return self._servers.get(address)

    # -- connections -----------------------------------------------------------------------

    async def connect(
        self, source: Process, factory: ProtocolFactory, address: str, kind: str
    ) -> Any:
        """Connect to ``address``; return the transport and its protocol. Raises OSError."""
        return await ConnectAttempt(self, source, factory, address, kind).connect()

    def serve(self, process: Process, factory: ProtocolFactory, address: str) -> SimServer:
        listener = self.listeners[address] = Listener(process, factory)
        return SimServer(self, address, listener)

    def sockets(self, kind: str) -> list[SimSocket]:
        """Return both ends of each open connection of the kind ``kind``."""
        return [each for process in self.processes for each in process.sockets if each.kind == kind]

    # -- streams ---------------------------------------------------------------------------

    def open(self, source: Process, address: str, kind: str, opening: Any = None) -> StreamEnd:
        """Begin to open a stream from the process ``source`` to the server at ``address``, and
        return the client's end immediately. If nothing listens there, the stream breaks later."""
        near = StreamEnd(self, source, is_client=True)
        near.connected = self.loop.create_future()
        at = self.arrival_time(source, self._process_at(address))
        self.loop.call_at(
            at, self._open_at_server, near, address, kind, opening, context=self.context
        )
        return near

    def _open_at_server(self, near: StreamEnd, address: str, kind: str, opening: Any) -> None:
        target = self._process_at(address)
        if target is None or not target.alive:
            at, refusal = self.arrival_time(near.process, None), Unavailable("connection refused")
            self.loop.call_at(at, near.break_off, refusal, context=near.process.context)
            return
        if near.failure is not None:
            return
        far = StreamEnd(self, target, is_client=False)
        far.peer = near
        server = self._servers[address][1]
        self.loop.call_soon(self._admit, far, server, kind, opening, context=target.context)
        near.attach_peer(far)

    def _admit(self, far: StreamEnd, server: Server, kind: str, opening: Any) -> None:
        if far.failure is None and far.process.alive:
            far._post(StreamEnd.mark_connected, None)
            server.accept(kind, opening, far)

    def reset(self, end: StreamEnd) -> None:
        """Reset a stream. Each end learns of it at its own time; messages in flight are lost."""
        for each in (end, end.peer):
            if each is not None:
                at = self.loop.time() + self.chance.number() ** 3
                lost = Unavailable("connection reset")
                self.loop.call_at(at, each.break_off, lost, context=each.process.context)

    # -- calls -----------------------------------------------------------------------------

    async def call(
        self, source: Process, address: str, ask: Callable[[Any], Awaitable[T]], seconds: float
    ) -> T:
        """Run ``ask`` at the server and return its result. Raises the BatonError that ``ask``
        raises, Unavailable if the server is or becomes unreachable, and DeadlineExceeded after
        ``seconds``."""
        call = Call(source, self.loop.create_future())
        at = self.arrival_time(source, self._process_at(address))
        self.loop.call_at(at, self._serve, call, address, ask, context=self.context)
        try:
            async with asyncio.timeout(seconds):
                answer: T = await call.answer
                return answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the server at {address} did not respond within {seconds:g} s"
            ) from error
        finally:
            if not call.answer.done() or call.answer.cancelled():
                self._abandon(call, address)

    def _serve(self, call: Call, address: str, ask: Callable[[Any], Awaitable[Any]]) -> None:
        target = self._process_at(address)
        if target is None or not target.alive:
            self._reply(call, None, None, Unavailable("connection refused"))
            return
        target.calls[call] = None
        call.task = target.start_task(self._answer(call, target, ask, self._servers[address][1]))

    def _abandon(self, call: Call, address: str) -> None:
        target = self._process_at(address)
        if target is not None:
            at = self.arrival_time(call.source, target)
            self.loop.call_at(at, call.give_up, context=target.context)

    async def _answer(
        self, call: Call, target: Process, ask: Callable[[Any], Awaitable[Any]], server: Any
    ) -> None:
        value, failure = None, None
        try:
            value = await ask(server)
        except BatonError as error:
            failure = error
        finally:
            call.task = None
        if target.calls.pop(call, call) is None:
            self._reply(call, target, value, failure)

    def _reply(
        self, call: Call, target: Process | None, value: Any, error: BatonError | None
    ) -> None:
        at = self.arrival_time(target, call.source)
        self.loop.call_at(at, call.settle, value, error, context=call.source.context)

    # -- faults ----------------------------------------------------------------------------

    def cut(self, process: Process) -> None:
        """End all connections of a dead process. Its peers learn of its death once the network
        delivers the notice."""
        for end in list(process.ends):
            if end.peer is not None:
                end._post(StreamEnd.break_off, Unavailable(f"{process.name} died"))
            end.failure = Unavailable("dead")
        process.ends.clear()
        for each in list(process.sockets):
            each.die(notifies_peer=not process.vanished)
        for call in process.calls:
            self._reply(call, process, None, Unavailable(f"{process.name} died"))
        process.calls.clear()

    def partition(
        self, one: Process, other: Process, seconds: float, *, one_way: bool = False
    ) -> None:
        """Partition two processes for ``seconds``; if ``one_way`` is set, only in the direction
        from ``one`` to ``other``. Streams survive a partition that is shorter than their keep-alive
        timeout."""
        healed_at = self.loop.time() + seconds
        self._healed_at[one.name, other.name] = healed_at
        if not one_way:
            self._healed_at[other.name, one.name] = healed_at
        for end in [*one.ends]:
            if end.peer is not None and end.peer.process is other:
                self._miss_keepalives(end, seconds)
                self._miss_keepalives(end.peer, seconds)

    def freeze(self, process: Process, seconds: float, *, answers_pings: bool = False) -> None:
        """Freeze a process for ``seconds``. If that is longer than the keep-alive timeout of a
        stream's peer, the peer gives up the stream, unless ``answers_pings`` is set."""
        process.freeze()
        for end in process.ends:
            if end.peer is not None and not answers_pings:
                self._miss_keepalives(end.peer, seconds)
        self.loop.call_later(seconds, self._thaw, process)

    def heal(self) -> None:
        self._healed_at.clear()
        self.handshake_faults_until = 0.0
        for process in self.processes:
            for each in process.sockets:
                each.release()
        self.slowness = 1.0

    def arrival_time(self, source: Process | None, target: Process | None) -> float:
        """Return the time at which a message that is sent now arrives."""
        chance = self.chance
        late = chance.number()
        delay = USUAL_SECONDS * chance.number()
        if late > 0.97:
            delay += LATE_SECONDS * (late - 0.97) / 0.03
        at = self.loop.time() + delay * self.slowness
        if self._healed_at and source is not None and target is not None:
            at = max(at, self._healed_at.get((source.name, target.name), 0.0) + delay)
        return at

    def _thaw(self, process: Process) -> None:
        if process.frozen:
            process.thaw()

    def _miss_keepalives(self, end: StreamEnd, seconds: float) -> None:
        bounds = CLIENT_KEEPALIVE if end.is_client else SERVER_KEEPALIVE
        patience = self.chance.uniform(*bounds)
        if patience < seconds:
            at, silent = self.loop.time() + patience, Unavailable("keep-alive missed")
            self.loop.call_at(at, end.lose, silent, context=end.process.context)

    def _process_at(self, address: str) -> Process | None:
        found = self._servers.get(address)
        return found[0] if found is not None else None
