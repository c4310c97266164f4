"""Base class of the backends that read a peer's memory by copying it: shm, cuda_ipc and memory."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import BatonError, Invalid, Unavailable
from baton.transport.base import Capabilities, Region, TransferRange, TransferState
from baton.transport.link_meter import LinkMeter, earlier_generations
from baton.transport.ranges import expect_transport, validated_ranges


@dataclass(eq=False, slots=True)
class CopyPeer:
    """A peer. ``num_copies`` is the number of copies from it that are in progress. After a
    disconnect, its memory is detached when the last copy ends."""

    endpoint: Endpoint
    is_connected: bool = True
    num_copies: int = 0


@dataclass(eq=False, slots=True)
class CopyTransfer:
    peer: CopyPeer
    ranges: list[TransferRange]
    size_bytes: int
    state: TransferState = TransferState.PREPARED
    error: str = ""


@dataclass(eq=False)
class CopyTransport:
    """A transport whose ``post`` does the copying, so that a posted transfer is DONE or FAILED and
    never PENDING, and ``release`` always succeeds. Each backend implements how memory is attached
    and copied."""

    owner: str
    generation: int
    host: str
    clock: Clock
    name: str = ""
    _region: Region | None = None
    _peers: dict[tuple[str, int], CopyPeer] = field(default_factory=dict)
    _meter: LinkMeter = field(default_factory=LinkMeter)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def register(self, region: Region) -> None:
        if region.device.partition(":")[0] not in self.capabilities().devices:
            served = " and ".join(sorted(self.capabilities().devices))
            raise Invalid(f"transport {self.name} serves memory of {served}, not {region.device}")
        assert self._region is None, "register() must be called only once"
        self._region = region

    @property
    def region(self) -> Region:
        assert self._region is not None, "register() must be called first"
        return self._region

    def connect(self, endpoint: Endpoint) -> CopyPeer:
        expect_transport(endpoint, self.name)
        key = (endpoint.owner, endpoint.generation)
        with self._lock:
            if key not in self._peers:
                self.attach(endpoint)
                for dead in earlier_generations(self._peers, endpoint):
                    self.disconnect(dead)
                self._peers[key] = CopyPeer(endpoint)
            return self._peers[key]

    def disconnect(self, peer: CopyPeer) -> None:
        with self._lock:
            key = (peer.endpoint.owner, peer.endpoint.generation)
            if self._peers.pop(key, None) is not None:
                peer.is_connected = False
                if peer.num_copies == 0:
                    self.detach(peer.endpoint)

    def idle_peers(self) -> list[CopyPeer]:
        with self._lock:
            return [peer for peer in self._peers.values() if peer.num_copies == 0]

    def prepare(
        self, peer: CopyPeer, ranges: Sequence[TransferRange], timeout_seconds: float
    ) -> CopyTransfer:
        joined = validated_ranges(ranges, self.region, peer.endpoint)
        return CopyTransfer(peer, joined, sum(span.size_bytes for span in joined))

    def post(self, transfer: CopyTransfer) -> None:
        assert transfer.state is TransferState.PREPARED, transfer.state
        began = self.clock.monotonic()
        try:
            with self._copying(transfer.peer):
                self.copy_all(transfer.peer.endpoint, transfer.ranges)
        except BatonError as error:
            transfer.state, transfer.error = TransferState.FAILED, str(error)
            return
        transfer.state = TransferState.DONE
        seconds = self.clock.monotonic() - began
        self._meter.record(transfer.peer.endpoint.owner, transfer.size_bytes, seconds)

    @contextlib.contextmanager
    def _copying(self, peer: CopyPeer) -> Iterator[None]:
        """Context manager around a copy. It keeps the peer's memory attached, even if the peer is
        disconnected meanwhile."""
        with self._lock:
            if not peer.is_connected:
                raise Unavailable(f"peer {peer.endpoint.owner} was disconnected")
            peer.num_copies += 1
        try:
            yield
        finally:
            with self._lock:
                peer.num_copies -= 1
                if not peer.is_connected and peer.num_copies == 0:
                    self.detach(peer.endpoint)

    def poll(self, transfer: CopyTransfer) -> TransferState:
        return transfer.state

    def release(self, transfer: CopyTransfer) -> bool:
        transfer.state = TransferState.RELEASED
        return True

    def estimate_seconds(self, peer: CopyPeer, size_bytes: int) -> float:
        return self._meter.estimate_seconds(peer.endpoint.owner, size_bytes)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.disconnect(peer)

    # -- implemented by each backend ------------------------------------------------------

    def attach(self, endpoint: Endpoint) -> None:
        """Open or map the peer's memory. Raises Unavailable, Invalid."""
        raise AssertionError("each backend must implement attach()")

    def detach(self, endpoint: Endpoint) -> None:
        raise AssertionError("each backend must implement detach()")

    def capabilities(self) -> Capabilities:
        raise AssertionError("each backend must implement capabilities()")

    def copy_all(self, endpoint: Endpoint, ranges: Sequence[TransferRange]) -> None:
        """Copy all ranges of a transfer, by default one after the other. The copies are complete
        when this returns. Raises Unavailable when the peer's memory is gone."""
        for span in ranges:
            self.copy(endpoint, span)

    def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
        """Copy one range. Raises Unavailable when the peer's memory is gone."""
        raise AssertionError("each backend must implement copy()")


def copy_memory(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes from address ``source`` to ``target``. Other threads can run meanwhile."""
    ctypes.memmove(target, source, size_bytes)
