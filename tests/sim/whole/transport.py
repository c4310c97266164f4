"""Reads of another process's memory, as hardware makes them: at their own time, whatever their
reader does meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.kv_transfer import Endpoint
from baton.errors import Unavailable
from baton.transport.base import Capabilities, Region, TransferRange, TransferState
from baton.transport.ranges import validated_ranges
from tests.sim.whole.chance import Chance
from tests.sim.whole.process import Process

NAME = "wire"

Guard = Callable[[TransferRange], None]
"""Raises AssertionError where a read is about to write to what is not its own."""


class SimMemory:
    """What ``HostMemory`` is, without a file."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))
        self.region = Region(0, size_bytes)


class Fabric:
    """Memories by (owner, generation), gone with their process. ``damage``, ``loss`` and ``stuck``
    are the probabilities that a read arrives damaged, not at all, or after everybody's patience."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.memories: dict[tuple[str, int], tuple[Process, memoryview]] = {}
        self.damage = 0.0
        self.loss = 0.0
        self.stuck = 0.0

    def be_well(self) -> None:
        self.damage = self.loss = self.stuck = 0.0

    def find(self, endpoint: Endpoint) -> tuple[Process, memoryview]:
        found = self.memories.get((endpoint.owner, endpoint.generation))
        if found is None or not found[0].alive:
            raise Unavailable(f"{endpoint.owner} is gone")
        return found


@dataclass(eq=False, slots=True)
class SimPeer:
    endpoint: Endpoint


@dataclass(eq=False, slots=True)
class SimTransfer:
    """``under_way``: it may still write here. ``ended``: nobody waits for it."""

    peer: SimPeer
    spans: list[TransferRange]
    size_bytes: int
    timeout_seconds: float
    state: TransferState = TransferState.PREPARED
    error: str = ""
    late_at: float = 0.0
    under_way: bool = False
    can_be_ended: bool = True


class SimTransport:
    """Implements :class:`baton.transport.base.Transport`: most reads are instant, others take a
    while, a few can't be ended, and one from a frozen process lasts until that thaws."""

    name = NAME

    def __init__(
        self,
        fabric: Fabric,
        process: Process,
        generation: int,
        host: str,
        memory: SimMemory,
        guard: Guard | None = None,
    ) -> None:
        self._fabric = fabric
        self._process = process
        self._generation = generation
        self._host = host
        self._memory = memory
        self._guard = guard
        fabric.memories[process.name, generation] = process, memory.view

    def capabilities(self) -> Capabilities:
        return Capabilities(local_only=True, devices=frozenset({"cpu"}), copies_in_post=False)

    def register(self, region: Region) -> None:
        """Its memory came with it."""

    def export(self) -> Endpoint:
        size = self._memory.region.size_bytes
        return Endpoint(NAME, self._process.name, self._generation, self._host, size, b"")

    def connect(self, endpoint: Endpoint) -> SimPeer:
        self._fabric.find(endpoint)
        return SimPeer(endpoint)

    def disconnect(self, peer: SimPeer) -> None:
        """Nothing is held."""

    def idle_peers(self) -> list[SimPeer]:
        return []  # nothing is held of anybody

    def prepare(
        self, peer: SimPeer, spans: Sequence[TransferRange], timeout_seconds: float
    ) -> SimTransfer:
        joined = validated_ranges(spans, self._memory.region, peer.endpoint)
        size = sum(span.size_bytes for span in joined)
        return SimTransfer(peer, joined, size, timeout_seconds)

    def post(self, transfer: SimTransfer) -> None:
        chance, loop = self._fabric.chance, self._process.loop
        transfer.state = TransferState.PENDING
        transfer.late_at = loop.time() + transfer.timeout_seconds
        transfer.under_way = True
        luck = chance.number()
        if luck < 0.8:
            self._finish(transfer)
            return
        transfer.can_be_ended = luck < 0.9
        stuck = luck > 1.0 - self._fabric.stuck
        seconds = 1.0 + 2.0 * chance.number() if stuck else 0.02 * chance.number() ** 2
        loop.call_later(seconds, self._finish, transfer, context=self._process.network.context)

    def poll(self, transfer: SimTransfer) -> TransferState:
        late = self._process.loop.time() > transfer.late_at
        if transfer.state is TransferState.PENDING and late:
            self._fail(transfer, "it takes too long")
        return transfer.state

    def release(self, transfer: SimTransfer) -> bool:
        if transfer.under_way and not transfer.can_be_ended:
            return False
        transfer.under_way = False
        transfer.state = TransferState.RELEASED
        return True

    def estimate_seconds(self, peer: SimPeer, size_bytes: int) -> float:
        return 0.001

    def close(self) -> None:
        """Nothing is held."""

    def _finish(self, transfer: SimTransfer) -> None:
        """The hardware comes to it: neither a frozen nor a cancelled reader keeps it from that."""
        if not transfer.under_way or not self._process.alive:
            return
        try:
            source, memory = self._fabric.find(transfer.peer.endpoint)
            if source.frozen and transfer.can_be_ended is False:
                context = self._process.network.context
                self._process.loop.call_later(0.1, self._finish, transfer, context=context)
                return
            self._copy(transfer, memory)
        except Unavailable as error:
            self._fail(transfer, str(error))
        else:
            if transfer.state is TransferState.PENDING:
                transfer.state = TransferState.DONE
        transfer.under_way = False

    def _copy(self, transfer: SimTransfer, memory: memoryview) -> None:
        fabric, target = self._fabric, self._memory.view
        if fabric.loss and fabric.chance.happens(fabric.loss):
            raise Unavailable("the read was lost")
        for span in transfer.spans:
            if self._guard is not None:
                self._guard(span)
            first, last = span.local_offset, span.local_offset + span.size_bytes
            target[first:last] = memory[span.remote_offset : span.remote_offset + span.size_bytes]
            if fabric.damage and fabric.chance.happens(fabric.damage):
                target[first + fabric.chance.below(span.size_bytes)] ^= 0xFF

    def _fail(self, transfer: SimTransfer, error: str) -> None:
        if transfer.state is TransferState.PENDING:
            transfer.state, transfer.error = TransferState.FAILED, error
