"""A transport for one-sided reads of another process's memory. As with RDMA hardware, a read
proceeds independently of what the reading process does meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.kv_transfer import Endpoint
from baton.errors import Unavailable
from baton.transport.base import Capabilities, Region, TransferRange, TransferState
from baton.transport.ranges import validated_ranges
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom

NAME = "wire"

Guard = Callable[[TransferRange], object]
"""Returns for what the memory of a read is reserved. Raises AssertionError if it isn't reserved."""


class SimMemory:
    """Like ``HostMemory``, but without a shared-memory file."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))
        self.region = Region(0, size_bytes)


class Fabric:
    """The memories of all processes, by owner and generation. A memory is unreachable once its
    process is dead. ``damage``, ``loss`` and ``stuck`` are the probabilities that the data of a
    read arrives damaged, does not arrive, or arrives later than any timeout."""

    def __init__(self, chance: SeededRandom) -> None:
        self.chance = chance
        self.memories: dict[tuple[str, int], tuple[Process, memoryview]] = {}
        self.damage = 0.0
        self.loss = 0.0
        self.stuck = 0.0

    def end_faults(self) -> None:
        self.damage = self.loss = self.stuck = 0.0

    def find(self, endpoint: Endpoint) -> tuple[Process, memoryview]:
        found = self.memories.get((endpoint.owner, endpoint.generation))
        if found is None or not found[0].alive:
            raise Unavailable(f"the process {endpoint.owner} is dead")
        return found


@dataclass(eq=False, slots=True)
class SimPeer:
    endpoint: Endpoint


@dataclass(eq=False, slots=True)
class SimTransfer:
    """A read. While ``in_flight`` is set, it may still write to the reader's memory."""

    peer: SimPeer
    spans: list[TransferRange]
    size_bytes: int
    timeout_seconds: float
    state: TransferState = TransferState.PREPARED
    error: str = ""
    deadline: float = 0.0
    in_flight: bool = False
    can_be_aborted: bool = True
    reserved_for: list[object] = field(default_factory=list)
    """For what the memory of each span was reserved when the read began."""


class SimTransport:
    """Implements :class:`baton.transport.base.Transport`. Most reads are instant, and others take a
    while. Some of these can't be aborted; if such a read is from a frozen process, it lasts until
    the process thaws."""

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
        """Do nothing, because the memory was passed to the constructor."""

    def export(self) -> Endpoint:
        size = self._memory.region.size_bytes
        return Endpoint(NAME, self._process.name, self._generation, self._host, size, b"")

    def connect(self, endpoint: Endpoint) -> SimPeer:
        self._fabric.find(endpoint)
        return SimPeer(endpoint)

    def disconnect(self, peer: SimPeer) -> None:
        """Do nothing, because peers hold no resources."""

    def idle_peers(self) -> list[SimPeer]:
        return []  # peers hold no resources

    def prepare(
        self, peer: SimPeer, spans: Sequence[TransferRange], timeout_seconds: float
    ) -> SimTransfer:
        joined = validated_ranges(spans, self._memory.region, peer.endpoint)
        size = sum(span.size_bytes for span in joined)
        return SimTransfer(peer, joined, size, timeout_seconds)

    def post(self, transfer: SimTransfer) -> None:
        chance, loop = self._fabric.chance, self._process.loop
        transfer.state = TransferState.PENDING
        transfer.deadline = loop.time() + transfer.timeout_seconds
        transfer.in_flight = True
        if self._guard is not None:
            transfer.reserved_for = [self._guard(span) for span in transfer.spans]
        draw = chance.number()
        if draw < 0.8:
            self._finish(transfer)
            return
        transfer.can_be_aborted = draw < 0.83
        is_stuck = draw > 1.0 - self._fabric.stuck
        seconds = 1.0 + 2.0 * chance.number() if is_stuck else 0.02 * chance.number() ** 2
        loop.call_later(seconds, self._finish, transfer, context=self._process.network.context)

    def poll(self, transfer: SimTransfer) -> TransferState:
        is_late = self._process.loop.time() > transfer.deadline
        if transfer.state is TransferState.PENDING and is_late:
            self._fail(transfer, "the read timed out")
        return transfer.state

    def release(self, transfer: SimTransfer) -> bool:
        if transfer.in_flight and not transfer.can_be_aborted:
            return False
        transfer.in_flight = False
        transfer.state = TransferState.RELEASED
        return True

    def estimate_seconds(self, peer: SimPeer, size_bytes: int) -> float:
        return 0.001

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    def _finish(self, transfer: SimTransfer) -> None:
        """Copy the data, even if the reader is frozen, unless the read was aborted or the reader is
        dead."""
        if not transfer.in_flight or not self._process.alive:
            return
        try:
            source, memory = self._fabric.find(transfer.peer.endpoint)
            if source.frozen and transfer.can_be_aborted is False:
                context = self._process.network.context
                self._process.loop.call_later(0.1, self._finish, transfer, context=context)
                return
            self._copy(transfer, memory)
        except Unavailable as error:
            self._fail(transfer, str(error))
        else:
            if transfer.state is TransferState.PENDING:
                transfer.state = TransferState.DONE
        transfer.in_flight = False

    def _copy(self, transfer: SimTransfer, memory: memoryview) -> None:
        fabric, target = self._fabric, self._memory.view
        if fabric.loss and fabric.chance.happens(fabric.loss):
            raise Unavailable("the read was lost")
        if self._guard is not None:
            for span, reserved_for in zip(transfer.spans, transfer.reserved_for, strict=True):
                assert self._guard(span) is reserved_for, (
                    f"a read writes to {span}, which is in use"
                )
        for span in transfer.spans:
            first, last = span.local_offset, span.local_offset + span.size_bytes
            target[first:last] = memory[span.remote_offset : span.remote_offset + span.size_bytes]
            if fabric.damage and fabric.chance.happens(fabric.damage):
                target[first + fabric.chance.below(span.size_bytes)] ^= 0xFF

    def _fail(self, transfer: SimTransfer, error: str) -> None:
        if transfer.state is TransferState.PENDING:
            transfer.state, transfer.error = TransferState.FAILED, error
