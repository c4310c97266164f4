"""What connects simulated processes: connections (:mod:`tests.sim.whole.sockets`), streams in order
and calls, as gRPC has them, and all that can happen to them.

A stream is TCP's: what is sent arrives once and in order, late, or the stream breaks, and each
end learns that in its own time. A partition holds everything up; it breaks streams once
keep-alives are missed. Who is dead refuses connections, and who is frozen takes them and is
silent.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from tests.sim.whole.chance import Chance
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.process import Process
from tests.sim.whole.sockets import Dial, Listener, ProtocolFactory, SimServer, SimSocket

T = TypeVar("T")

CLIENT_KEEPALIVE = (1.4, 2.4)
SERVER_KEEPALIVE = (5.0, 10.0)
"""Seconds until a side gives up on a silent peer, as ``baton.rpc.channel`` and ``server`` say."""

USUAL_SECONDS = 0.001
LATE_SECONDS = 0.06


class Server(Protocol):
    """What listens at an address. Methods beside it are called by name (see ``Network.call``)."""

    def accept(self, kind: str, opening: Any, end: "End") -> None: ...


class End:
    """One process's end of a stream. Messages go to ``on_message``, or wait for :meth:`get`."""

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
        self.peer: End | None = None
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
        """Lost if the stream is broken, as a message in a buffer is."""
        if self.failure is not None or not self.process.alive:
            return
        if self.peer is None:
            self._early.append(message)
        else:
            self._post(End._receive, message)

    def close(self, error: BatonError | None = None) -> None:
        """The peer gets what was sent before, then ``error``, or that the stream ended."""
        if self.failure is None and self.process.alive and self.peer is not None:
            self._post(End.break_off, error or Unavailable("the stream ended"))
        self.break_off(Unavailable("it was closed here"))

    def lose(self, error: BatonError) -> None:
        """This end gives up; the other one learns it if anything still gets through."""
        if self.failure is None and self.process.alive and self.peer is not None:
            self._post(End.break_off, Unavailable("the peer gave up"))
        self.break_off(error)

    async def get(self) -> Any:
        """The next message; what ended the stream after the last one."""
        while not self._inbox:
            if self.failure is not None:
                raise self.failure
            self._waiter = self.network.loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def over(self) -> None:
        """Until this end knows that the stream has broken or ended."""
        while self.failure is None:
            self._over = self._over or self.network.loop.create_future()
            await asyncio.wait([self._over])

    def break_off(self, error: BatonError) -> None:
        """This end only."""
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

    def meet(self, peer: "End") -> None:
        """The other side is there: what was said before is on its way."""
        self.peer = peer
        for message in self._early:
            self._post(End._receive, message)

    def greet(self, _: object = None) -> None:
        """The other side has answered."""
        if self.connected is not None and not self.connected.done():
            self.connected.set_result(None)

    def _post(self, what: "Callable[[End, Any], None]", item: Any) -> None:
        peer = self.peer
        assert peer is not None
        self._last_at = max(self.network.arrival(self.process, peer.process), self._last_at)
        self.network.loop.call_at(self._last_at, what, peer, item, context=peer.process.context)

    def _receive(self, message: Any) -> None:
        if self.failure is not None or not self.process.alive:
            self._refuse()
        elif self.on_message is not None:
            self.on_message(message)
        else:
            self._inbox.append(message)
            self._wake()

    def _refuse(self) -> None:
        """Nobody reads here any more: whoever sends learns it now, if he did not know. A process
        that lives sends that behind what it sent before: a stream that ended well stays so."""
        peer = self.peer
        if peer is not None and peer.failure is None:
            at = self.network.arrival(self.process, peer.process)
            at = max(at, self._last_at) if self.process.alive else at
            reset = Unavailable("connection reset")
            self.network.loop.call_at(at, peer.break_off, reset, context=peer.process.context)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Call:
    """One question that waits for its answer."""

    __slots__ = ("answer", "at_work", "source")

    def __init__(self, source: Process, answer: "asyncio.Future[Any]") -> None:
        self.source = source
        self.answer = answer
        self.at_work: asyncio.Task[Any] | None = None

    def give_up(self) -> None:
        """Nobody waits any more."""
        if self.at_work is not None:
            self.at_work.cancel()

    def settle(self, value: Any, error: BatonError | None) -> None:
        if self.answer.done() or not self.source.alive:
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class Network:
    def __init__(self, loop: SimLoop, chance: Chance) -> None:
        self.loop = loop
        self.chance = chance
        self.slowness = 1.0
        self.context = copy_context()
        """Of whatever belongs to no process."""
        self.processes: list[Process] = []
        self.listeners: dict[str, Listener] = {}
        self.walls: dict[str, str] = {}
        """What a firewall does (:class:`tests.sim.whole.sockets.Wall`), by address."""
        self.shaken_until = 0.0
        """Until when lines break while they shake hands."""
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
        """The transport and its protocol. Raises OSError."""
        return await Dial(self, source, factory, address, kind).connect()

    def serve(self, process: Process, factory: ProtocolFactory, address: str) -> SimServer:
        listener = self.listeners[address] = Listener(process, factory)
        return SimServer(self, address, listener)

    def sockets(self, kind: str) -> list[SimSocket]:
        """Both ends of each connection, as long as they know no end of it."""
        return [each for process in self.processes for each in process.sockets if each.kind == kind]

    # -- streams ---------------------------------------------------------------------------

    def open(self, source: Process, address: str, kind: str, opening: Any = None) -> End:
        """At once; whether anybody is there shows later."""
        near = End(self, source, is_client=True)
        near.connected = self.loop.create_future()
        at = self.arrival(source, self._process_at(address))
        self.loop.call_at(at, self._knock, near, address, kind, opening, context=self.context)
        return near

    def _knock(self, near: End, address: str, kind: str, opening: Any) -> None:
        target = self._process_at(address)
        if target is None or not target.alive:
            at, refusal = self.arrival(near.process, None), Unavailable("connection refused")
            self.loop.call_at(at, near.break_off, refusal, context=near.process.context)
            return
        if near.failure is not None:
            return
        far = End(self, target, is_client=False)
        far.peer = near
        server = self._servers[address][1]
        self.loop.call_soon(self._admit, far, server, kind, opening, context=target.context)
        near.meet(far)

    def _admit(self, far: End, server: Server, kind: str, opening: Any) -> None:
        if far.failure is None and far.process.alive:
            far._post(End.greet, None)
            server.accept(kind, opening, far)

    def reset(self, end: End) -> None:
        """Each end learns it in its own time; what is under way is lost."""
        for each in (end, end.peer):
            if each is not None:
                at = self.loop.time() + self.chance.number() ** 3
                lost = Unavailable("connection reset")
                self.loop.call_at(at, each.break_off, lost, context=each.process.context)

    # -- calls -----------------------------------------------------------------------------

    async def call(
        self, source: Process, address: str, ask: Callable[[Any], Awaitable[T]], seconds: float
    ) -> T:
        """Raises what ``ask`` does at the other side, Unavailable, DeadlineExceeded."""
        call = Call(source, self.loop.create_future())
        at = self.arrival(source, self._process_at(address))
        self.loop.call_at(at, self._serve, call, address, ask, context=self.context)
        try:
            async with asyncio.timeout(seconds):
                answer: T = await call.answer
                return answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"{address} is silent") from error
        finally:
            if not call.answer.done() or call.answer.cancelled():
                self._abandon(call, address)

    def _serve(self, call: Call, address: str, ask: Callable[[Any], Awaitable[Any]]) -> None:
        target = self._process_at(address)
        if target is None or not target.alive:
            self._reply(call, None, None, Unavailable("connection refused"))
            return
        target.calls[call] = None
        call.at_work = target.spawn(self._answer(call, target, ask, self._servers[address][1]))

    def _abandon(self, call: Call, address: str) -> None:
        target = self._process_at(address)
        if target is not None:
            at = self.arrival(call.source, target)
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
            call.at_work = None
        if target.calls.pop(call, call) is None:
            self._reply(call, target, value, failure)

    def _reply(
        self, call: Call, target: Process | None, value: Any, error: BatonError | None
    ) -> None:
        at = self.arrival(target, call.source)
        self.loop.call_at(at, call.settle, value, error, context=call.source.context)

    # -- faults ----------------------------------------------------------------------------

    def cut(self, process: Process) -> None:
        """It is dead: its peers learn it as soon as the network lets them."""
        for end in list(process.ends):
            if end.peer is not None:
                end._post(End.break_off, Unavailable(f"{process.name} died"))
            end.failure = Unavailable("dead")
        process.ends.clear()
        for each in list(process.sockets):
            each.die(is_told=not process.vanished)
        for call in process.calls:
            self._reply(call, process, None, Unavailable(f"{process.name} died"))
        process.calls.clear()

    def part(self, one: Process, other: Process, seconds: float, *, one_way: bool = False) -> None:
        """Nothing passes between the two for so long, or not from the one to the other; what keeps
        a connection may outlive it if it is short."""
        healed_at = self.loop.time() + seconds
        self._healed_at[one.name, other.name] = healed_at
        if not one_way:
            self._healed_at[other.name, one.name] = healed_at
        for end in [*one.ends]:
            if end.peer is not None and end.peer.process is other:
                self._miss_keepalives(end, seconds)
                self._miss_keepalives(end.peer, seconds)

    def freeze(self, process: Process, seconds: float, *, answers_pings: bool = False) -> None:
        """Its peers' keep-alives find out if it takes long, unless somebody answers for it."""
        process.freeze()
        for end in process.ends:
            if end.peer is not None and not answers_pings:
                self._miss_keepalives(end.peer, seconds)
        self.loop.call_later(seconds, self._thaw, process)

    def heal(self) -> None:
        self._healed_at.clear()
        self.shaken_until = 0.0
        for process in self.processes:
            for each in process.sockets:
                each.release()
        self.slowness = 1.0

    def arrival(self, source: Process | None, target: Process | None) -> float:
        """When a message that is sent now arrives."""
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

    def _miss_keepalives(self, end: End, seconds: float) -> None:
        bounds = CLIENT_KEEPALIVE if end.is_client else SERVER_KEEPALIVE
        patience = self.chance.uniform(*bounds)
        if patience < seconds:
            at, silent = self.loop.time() + patience, Unavailable("keep-alive missed")
            self.loop.call_at(at, end.lose, silent, context=end.process.context)

    def _process_at(self, address: str) -> Process | None:
        found = self._servers.get(address)
        return found[0] if found is not None else None
