"""NIXL: RDMA, TCP or shared memory through UCX, from host or device memory.

As tried with 1.5.1 on host memory: a dead peer raises nixlRemoteDisconnectError at the next
post or check; a frozen one leaves a TCP transfer in PROC for ever, so deadlines are ours; over
shared memory a dead peer's transfer may report DONE, so only checksums count. Nothing fences a
read that is under way: after release_xfer_handle, which reports success, and even after
remove_remote_agent, a frozen peer that comes back still fills the local blocks. So a transfer is
let go only when NIXL has seen its end.
"""

import contextlib
import importlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.clock import Clock
from baton.core.handoff import Endpoint
from baton.errors import Invalid, Unavailable
from baton.transport.base import Capabilities, Region, Span, TransferState
from baton.transport.links import LinkMeter, earlier_lives
from baton.transport.spans import checked_spans, expect_transport

NAME = "nixl"
WHEELS = ("nixl_cu13", "nixl_cu12")
"""The top-level package ``nixl`` only chooses between these, and imports torch to do so."""

PROGRESS_WAIT_MICROS = 100_000
"""Of the progress thread, unless something arrives."""

_HEADER = struct.Struct("<QHB")
"""Address of the region, its device's number, and whether it is device memory."""


@dataclass(eq=False, slots=True)
class NixlPeer:
    endpoint: Endpoint
    agent: str
    address: int
    device: int
    memory: str
    connected: bool = True


@dataclass(eq=False, slots=True)
class NixlTransfer:
    peer: NixlPeer
    local: list[tuple[int, int, int]]
    remote: list[tuple[int, int, int]]
    size_bytes: int
    timeout_seconds: float
    handle: Any = None
    under_way: bool = False
    error: str = ""
    began: float = 0.0
    state: TransferState = TransferState.PREPARED


@dataclass(eq=False)
class NixlTransport:
    """One agent. Its calls are not safe beside each other, so one lock orders them. ``post``
    holds it for as long as UCX copies, which within a host it may do at once; so ``prepare``
    leaves the agent alone, and ``poll`` and ``release`` come back later when it is taken.
    A progress thread of NIXL's own serves the peers' reads."""

    owner: str
    generation: int
    clock: Clock
    host_id: str
    name: str = NAME
    _peers: dict[tuple[str, int], NixlPeer] = field(default_factory=dict)
    _meter: LinkMeter = field(default_factory=LinkMeter)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _region: Region | None = None
    _agent: Any = None
    _registered: Any = None

    def capabilities(self) -> Capabilities:
        devices = frozenset({"cpu", "cuda"})
        return Capabilities(local_only=False, devices=devices, copies_in_post=True)

    def register(self, region: Region) -> None:
        self._region = region
        with self._lock, _foreign("start"):
            self._agent = _new_agent(f"{self.owner}-{self.generation}")
            memory, device = _memory(region.device)
            self._registered = self._agent.register_memory(
                [(region.address, region.size_bytes, device, "")], memory
            )

    def export(self) -> Endpoint:
        assert self._region is not None, "register() comes first"
        memory, device = _memory(self._region.device)
        header = _HEADER.pack(self._region.address, device, memory == "VRAM")
        with self._lock, _foreign("export"):
            metadata = header + self._agent.get_agent_metadata()
        size = self._region.size_bytes
        return Endpoint(NAME, self.owner, self.generation, self.host_id, size, metadata)

    def connect(self, endpoint: Endpoint) -> NixlPeer:
        expect_transport(endpoint, NAME)
        key = (endpoint.owner, endpoint.generation)
        with self._lock:
            if key not in self._peers:
                added = self._add(endpoint)
                for dead in earlier_lives(self._peers, endpoint):
                    self.disconnect(dead)
                self._peers[key] = added
            return self._peers[key]

    def _add(self, endpoint: Endpoint) -> NixlPeer:
        if len(endpoint.metadata) <= _HEADER.size:
            raise Invalid("malformed nixl endpoint")
        address, device, on_device = _HEADER.unpack_from(endpoint.metadata)
        with _foreign("connect"):
            agent = self._agent.add_remote_agent(endpoint.metadata[_HEADER.size :])
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        return NixlPeer(endpoint, name, address, device, "VRAM" if on_device else "DRAM")

    def disconnect(self, peer: NixlPeer) -> None:
        with self._lock:
            key = (peer.endpoint.owner, peer.endpoint.generation)
            if self._peers.pop(key, None) is not None:
                peer.connected = False
                with contextlib.suppress(Unavailable), _foreign("disconnect"):
                    self._agent.remove_remote_agent(peer.agent)

    def prepare(
        self, peer: NixlPeer, spans: Sequence[Span], timeout_seconds: float
    ) -> NixlTransfer:
        assert self._region is not None, "register() comes first"
        joined = checked_spans(spans, self._region, peer.endpoint)
        _, device = _memory(self._region.device)
        base = self._region.address
        local = [(base + span.local_offset, span.size_bytes, device) for span in joined]
        remote = [
            (peer.address + span.remote_offset, span.size_bytes, peer.device) for span in joined
        ]
        size = sum(span.size_bytes for span in joined)
        return NixlTransfer(peer, local, remote, size, timeout_seconds)

    def post(self, transfer: NixlTransfer) -> None:
        assert transfer.state is TransferState.PREPARED, transfer.state
        transfer.state, transfer.began = TransferState.PENDING, self.clock.monotonic()
        with self._lock:
            self._advance(transfer, self._begin)

    def _begin(self, transfer: NixlTransfer) -> str:
        peer = transfer.peer
        if not peer.connected:
            raise Unavailable(f"peer {peer.endpoint.owner} was disconnected")
        assert self._region is not None
        memory, _ = _memory(self._region.device)
        transfer.handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(transfer.local, memory),
            self._agent.get_xfer_descs(transfer.remote, peer.memory),
            peer.agent,
        )
        transfer.under_way = True
        return str(self._agent.transfer(transfer.handle))

    def poll(self, transfer: NixlTransfer) -> TransferState:
        if transfer.state is TransferState.PENDING and self._lock.acquire(blocking=False):
            try:
                self._advance(transfer, self._look)
            finally:
                self._lock.release()
        return transfer.state

    def _look(self, transfer: NixlTransfer) -> str:
        return str(self._agent.check_xfer_state(transfer.handle))

    def _advance(self, transfer: NixlTransfer, ask: Callable[[NixlTransfer], str]) -> None:
        """Takes NIXL's word on how far it is. Under the lock."""
        try:
            with _foreign("read"):
                answer = ask(transfer)
        except Unavailable as error:
            transfer.state, transfer.error = TransferState.FAILED, str(error)
            transfer.under_way = False
            return
        seconds = self.clock.monotonic() - transfer.began
        transfer.under_way = answer == "PROC"
        if answer == "DONE":
            transfer.state = TransferState.DONE
            self._meter.record(transfer.peer.endpoint.owner, transfer.size_bytes, seconds)
        elif answer != "PROC":
            transfer.state, transfer.error = TransferState.FAILED, f"nixl says {answer}"
        elif seconds > transfer.timeout_seconds or not transfer.peer.connected:
            transfer.state = TransferState.FAILED
            transfer.error = f"not done after {seconds:.3f} s"

    def release(self, transfer: NixlTransfer) -> bool:
        """False while the read may still be under way; ask again later."""
        if transfer.state is TransferState.RELEASED:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._has_ended(transfer) and self._free(transfer)
        finally:
            self._lock.release()

    def _has_ended(self, transfer: NixlTransfer) -> bool:
        if transfer.under_way:
            try:
                with _foreign("read"):
                    transfer.under_way = self._look(transfer) == "PROC"
            except Unavailable:
                transfer.under_way = False  # the connection broke, and the read with it
        return not transfer.under_way

    def _free(self, transfer: NixlTransfer) -> bool:
        if transfer.handle is not None:
            try:
                with _foreign("release"):
                    self._agent.release_xfer_handle(transfer.handle)
            except Unavailable as error:
                transfer.error = str(error)
                return False
        transfer.state = TransferState.RELEASED
        return True

    def estimate_seconds(self, peer: NixlPeer, size_bytes: int) -> float:
        return self._meter.estimate_seconds(peer.endpoint.owner, size_bytes)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.disconnect(peer)
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(Unavailable), _foreign("close"):
                    self._agent.deregister_memory(self._registered)
                self._agent = None


def _new_agent(name: str) -> Any:
    """Raises Unavailable when no wheel can be imported or UCX doesn't start."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    for wheel in WHEELS:
        try:
            api = importlib.import_module(f"{wheel}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.ERROR)
        logging.getLogger(wheel).setLevel(logging.ERROR)
        with _patient_progress(api.nixlBind):
            return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    raise Unavailable(f"transport nixl: none of {', '.join(WHEELS)} can be imported")


@contextlib.contextmanager
def _patient_progress(bindings: Any) -> Iterator[None]:
    """Agents made within wait for events in their progress thread. NIXL's Python wrapper sets
    that wait to zero, with no way to say otherwise, and the thread burns a whole core."""
    original = bindings.nixlAgentConfig

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_WAIT_MICROS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


def _memory(device: str) -> tuple[str, int]:
    """NIXL's name of the kind of memory, and the device's number."""
    if device == "cpu":
        return "DRAM", 0
    return "VRAM", int(device.partition(":")[2] or 0)


@contextlib.contextmanager
def _foreign(what: str) -> Iterator[None]:
    """NIXL's exceptions, which have no common base, as Unavailable."""
    try:
        yield
    except (Unavailable, Invalid):
        raise
    except Exception as error:
        raise Unavailable(f"nixl {what}: {type(error).__name__} {error}") from error
