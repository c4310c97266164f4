"""What the backends share that read a peer's memory by copying it: shm, and memory."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.core.handoff import Endpoint
from baton.errors import BatonError, Invalid
from baton.transport.base import Region, Span, TransferState
from baton.transport.links import LinkMeter
from baton.transport.spans import checked_spans, expect_transport


@dataclass(eq=False, slots=True)
class CopyPeer:
    endpoint: Endpoint
    connected: bool = True


@dataclass(eq=False, slots=True)
class CopyTransfer:
    peer: CopyPeer
    spans: list[Span]
    size_bytes: int
    state: TransferState = TransferState.PREPARED
    error: str = ""


@dataclass(eq=False)
class CopyTransport:
    """``post`` copies, so a posted transfer is DONE or FAILED and never PENDING, and release
    always leaves the local region alone. A backend says how memory is found and copied."""

    owner: str
    generation: int
    host: str
    clock: Clock
    name: str = ""
    _region: Region | None = None
    _peers: dict[tuple[str, int], CopyPeer] = field(default_factory=dict)
    _meter: LinkMeter = field(default_factory=LinkMeter)

    def register(self, region: Region) -> None:
        if region.device != "cpu":
            raise Invalid(f"transport {self.name} serves host memory, not {region.device}")
        assert self._region is None, "register() comes once"
        self._region = region

    @property
    def region(self) -> Region:
        assert self._region is not None, "register() comes first"
        return self._region

    def connect(self, endpoint: Endpoint) -> CopyPeer:
        expect_transport(endpoint, self.name)
        key = (endpoint.owner, endpoint.generation)
        if key not in self._peers:
            self.attach(endpoint)
            self._peers[key] = CopyPeer(endpoint)
        return self._peers[key]

    def disconnect(self, peer: CopyPeer) -> None:
        if self._peers.pop((peer.endpoint.owner, peer.endpoint.generation), None) is not None:
            peer.connected = False
            self.detach(peer.endpoint)

    def prepare(
        self, peer: CopyPeer, spans: Sequence[Span], timeout_seconds: float
    ) -> CopyTransfer:
        joined = checked_spans(spans, self.region, peer.endpoint)
        return CopyTransfer(peer, joined, sum(span.size_bytes for span in joined))

    def post(self, transfer: CopyTransfer) -> None:
        assert transfer.state is TransferState.PREPARED, transfer.state
        began = self.clock.monotonic()
        try:
            if not transfer.peer.connected:
                raise Invalid(f"peer {transfer.peer.endpoint.owner} was disconnected")
            for span in transfer.spans:
                self.copy(transfer.peer.endpoint, span)
        except BatonError as error:
            transfer.state, transfer.error = TransferState.FAILED, str(error)
            return
        transfer.state = TransferState.DONE
        seconds = self.clock.monotonic() - began
        self._meter.record(transfer.peer.endpoint.owner, transfer.size_bytes, seconds)

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

    # -- what a backend adds --------------------------------------------------------------

    def attach(self, endpoint: Endpoint) -> None:
        """Finds the peer's memory. Raises Unavailable, Invalid."""
        raise AssertionError("a backend's own")

    def detach(self, endpoint: Endpoint) -> None:
        raise AssertionError("a backend's own")

    def copy(self, endpoint: Endpoint, span: Span) -> None:
        """Raises Unavailable when the peer's memory is gone."""
        raise AssertionError("a backend's own")


def copy_memory(target: int, source: int, size_bytes: int) -> None:
    """memmove between addresses; other threads run meanwhile."""
    ctypes.memmove(target, source, size_bytes)
