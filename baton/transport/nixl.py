"""Transfers KV with NIXL and UCX, between host or device memory: within a host and, if
``interfaces`` names network devices, over RDMA or TCP.

UCX does not authenticate: any program that reaches one of its sockets, or an RDMA device that UCX
opened, can read and write this process's memory. So by default UCX opens no network device here.
Within a host it uses memory files and process_vm_readv, which the kernel restricts to processes of
one user.

Behaviour of NIXL 1.5.1 on host memory, as tested: a dead peer raises nixlRemoteDisconnectError at
the next post or check; a frozen one leaves a TCP transfer in PROC for ever, so this module has its
own deadlines; over shared memory a dead peer's transfer may report DONE, so only checksums count. A
read that is in progress can't be fenced: after release_xfer_handle, which reports success, and even
after remove_remote_agent, a frozen peer that comes back still writes to the local blocks. So a
transfer is released only when NIXL has reported its end.
"""

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.network.address import host_port
from baton.network.listeners import NO_AUTHENTICATION, announce_listener
from baton.transport.base import Capabilities, Region, TransferRange, TransferState
from baton.transport.link_meter import LinkMeter, earlier_generations
from baton.transport.ranges import expect_transport, validated_ranges

NAME = "nixl"
LOCAL_NAME = "nixl_local"
"""The transport's name without a network, so that members on other hosts don't try to use it."""

LOCAL_TLS = ("posix", "cma", "self")
"""UCX's transports for host memory on one host. ``sysv`` is left out: its segments can be attached
by number, ``posix``'s only through /proc of a process of the same user."""

CUDA_TLS = ("cuda",)
"""UCX's alias for copies within a GPU, between GPUs of one host, and over NVLink."""

GPU_HOST_TLS = ("cuda_copy",)
"""NIXL requires these transports on a host with an NVIDIA GPU, even for host memory."""

GPU_FILE = Path("/dev/nvidiactl")
"""Present on hosts with an NVIDIA GPU."""

DEVICE_FOLDERS = (Path("/sys/class/net"), Path("/sys/class/infiniband"))
WHEELS = ("nixl_cu13", "nixl_cu12")
"""NIXL's packages, one per version of CUDA. The package ``nixl`` only chooses between them, and
imports torch to do so."""

PROGRESS_WAIT_MICROS = 100_000
"""How long the progress thread waits, unless an event arrives."""

HOST_LANES = 2
"""Number of agents for host memory. Within a host UCX copies in ``post``, and two cores copy 1.4
times as fast as one. For GPU memory one agent suffices, since the GPU's own engines copy it."""

log = structlog.get_logger(__name__)

_HEADER = struct.Struct("<QHB")
"""The region's address, its device number, and whether it is device memory."""


@dataclass(eq=False, slots=True)
class _Lane:
    """One NIXL agent, with its own connections. An agent is not thread-safe, so each call holds the
    lock."""

    agent: Any
    registered: Any
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(eq=False, slots=True)
class NixlPeer:
    """A connected peer. ``agents``: its agent name in each lane. ``num_unreleased``: for each lane,
    the number of reads that NIXL has not released; changed under the lane's lock."""

    endpoint: Endpoint
    agents: list[str]
    address: int
    device: int
    memory: str
    num_unreleased: list[int]
    is_connected: bool = True


@dataclass(eq=False, slots=True)
class NixlTransfer:
    peer: NixlPeer
    local: list[tuple[int, int, int]]
    remote: list[tuple[int, int, int]]
    size_bytes: int
    timeout_seconds: float
    lane: _Lane | None = None
    handle: Any = None
    is_in_progress: bool = False
    error: str = ""
    began: float = 0.0
    state: TransferState = TransferState.PREPARED


@dataclass(eq=False)
class NixlTransport:
    """Reads from peers through a few lanes, each of which has a NIXL agent; peers read from the
    agent of the first lane. ``post`` keeps its lane locked until UCX returns; within a host, UCX
    may do the whole transfer in that call. ``prepare``, ``poll`` and ``release`` never wait for it:
    ``prepare`` uses no agent; while the transfer's lane is locked, ``poll`` returns the last known
    state, and ``release`` returns False. NIXL's own progress threads serve the
    peers' reads.

    ``interfaces`` are the network devices that UCX may use, by their UCX names (``eth1``,
    ``mlx5_0:1``). If ``interfaces`` is empty, UCX reaches only its own host, and listens on no
    network."""

    owner: str
    generation: int
    clock: Clock
    host_id: str
    interfaces: tuple[str, ...] = ()
    name: str = field(init=False)
    _peers: dict[tuple[str, int], NixlPeer] = field(default_factory=dict)
    _meter: LinkMeter = field(default_factory=LinkMeter)
    _peers_lock: threading.RLock = field(default_factory=threading.RLock)
    _region: Region | None = None
    _lanes: list[_Lane] = field(default_factory=list)
    _next_lane: int = 0

    def __post_init__(self) -> None:
        self.name = NAME if self.interfaces else LOCAL_NAME

    def capabilities(self) -> Capabilities:
        return Capabilities(
            local_only=self.name == LOCAL_NAME,
            devices=frozenset({"cpu", "cuda"}),
            copies_in_post=True,
            waits_in_post=True,
        )

    def register(self, region: Region) -> None:
        self._region = region
        memory, device = _memory(region.device)
        before = _tcp_listeners() if self.interfaces else set()
        with _translated_errors("start"):
            for number in range(HOST_LANES if memory == "DRAM" else 1):
                name = f"{self.owner}-{self.generation}-{number}"
                agent = new_agent(name, self.interfaces, on_device=memory == "VRAM")
                registered = agent.register_memory(
                    [(region.address, region.size_bytes, device, "")], memory
                )
                self._lanes.append(_Lane(agent, registered))
        for address in (_tcp_listeners() if self.interfaces else set()) - before:
            announce_listener("ucx", address, NO_AUTHENTICATION)

    def export(self) -> Endpoint:
        assert self._region is not None, "register() must be called first"
        memory, device = _memory(self._region.device)
        header = _HEADER.pack(self._region.address, device, memory == "VRAM")
        lane = self._lanes[0]
        with lane.lock, _translated_errors("export"):
            metadata = header + lane.agent.get_agent_metadata()
        size = self._region.size_bytes
        return Endpoint(self.name, self.owner, self.generation, self.host_id, size, metadata)

    def connect(self, endpoint: Endpoint) -> NixlPeer:
        expect_transport(endpoint, self.name)
        key = (endpoint.owner, endpoint.generation)
        with self._peers_lock:
            if key not in self._peers:
                added = self._add(endpoint)
                for dead in earlier_generations(self._peers, endpoint):
                    self.disconnect(dead)
                self._peers[key] = added
            return self._peers[key]

    def _add(self, endpoint: Endpoint) -> NixlPeer:
        if len(endpoint.metadata) <= _HEADER.size:
            raise Invalid(
                f"malformed nixl endpoint: its metadata must have more than {_HEADER.size} bytes, "
                f"not {len(endpoint.metadata)}"
            )
        address, device, on_device = _HEADER.unpack_from(endpoint.metadata)
        names = []
        for lane in self._lanes:
            with lane.lock, _translated_errors("connect"):
                name = lane.agent.add_remote_agent(endpoint.metadata[_HEADER.size :])
            names.append(name.decode() if isinstance(name, bytes) else str(name))
        memory = "VRAM" if on_device else "DRAM"
        return NixlPeer(endpoint, names, address, device, memory, [0] * len(self._lanes))

    def disconnect(self, peer: NixlPeer) -> None:
        with self._peers_lock:
            key = (peer.endpoint.owner, peer.endpoint.generation)
            if self._peers.pop(key, None) is None:
                return
            peer.is_connected = False
            for lane, name in zip(self._lanes, peer.agents, strict=True):
                with lane.lock, contextlib.suppress(Unavailable), _translated_errors("disconnect"):
                    lane.agent.remove_remote_agent(name)

    def idle_peers(self) -> list[NixlPeer]:
        """Return the connected peers without unreleased reads. A read from a frozen peer may still
        write to the local blocks when the peer comes back. Only NIXL can report the end of such a
        read, so the peer must stay connected until all reads from it have been released."""
        with self._peers_lock:
            return [peer for peer in self._peers.values() if not any(peer.num_unreleased)]

    def prepare(
        self, peer: NixlPeer, ranges: Sequence[TransferRange], timeout_seconds: float
    ) -> NixlTransfer:
        assert self._region is not None, "register() must be called first"
        joined = validated_ranges(ranges, self._region, peer.endpoint)
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
        lane = self._free_lane()
        transfer.lane = lane
        transfer.state, transfer.began = TransferState.PENDING, self.clock.monotonic()
        try:
            self._update_state(transfer, self._begin)
        finally:
            lane.lock.release()

    def _free_lane(self) -> _Lane:
        """Lock and return a lane: one that is free now, or else the next one in turn."""
        for lane in self._lanes:
            if lane.lock.acquire(blocking=False):
                return lane
        self._next_lane += 1
        lane = self._lanes[self._next_lane % len(self._lanes)]
        lane.lock.acquire()
        return lane

    def _begin(self, transfer: NixlTransfer) -> str:
        peer, lane = transfer.peer, transfer.lane
        if not peer.is_connected:
            raise Unavailable(f"peer {peer.endpoint.owner} was disconnected")
        assert self._region is not None and lane is not None
        memory, _ = _memory(self._region.device)
        number = self._lanes.index(lane)
        transfer.handle = lane.agent.initialize_xfer(
            "READ",
            lane.agent.get_xfer_descs(transfer.local, memory),
            lane.agent.get_xfer_descs(transfer.remote, peer.memory),
            peer.agents[number],
        )
        peer.num_unreleased[number] += 1
        transfer.is_in_progress = True
        return str(lane.agent.transfer(transfer.handle))

    def poll(self, transfer: NixlTransfer) -> TransferState:
        lane = transfer.lane
        if transfer.state is not TransferState.PENDING or lane is None:
            return transfer.state
        if lane.lock.acquire(blocking=False):
            try:
                if transfer.state is TransferState.PENDING:
                    self._update_state(transfer, _check_status)
            finally:
                lane.lock.release()
        return transfer.state

    def _update_state(
        self, transfer: NixlTransfer, get_status: Callable[[NixlTransfer], str]
    ) -> None:
        """Set the transfer's state from NIXL's status. The caller holds the lane's lock."""
        try:
            with _translated_errors("read"):
                status = get_status(transfer)
        except Unavailable as error:
            transfer.state, transfer.error = TransferState.FAILED, str(error)
            transfer.is_in_progress = False
            return
        seconds = self.clock.monotonic() - transfer.began
        transfer.is_in_progress = status == "PROC"
        if status == "DONE":
            transfer.state = TransferState.DONE
            self._meter.record(transfer.peer.endpoint.owner, transfer.size_bytes, seconds)
        elif status != "PROC":
            transfer.state, transfer.error = TransferState.FAILED, f"nixl reports {status}"
        elif seconds > transfer.timeout_seconds or not transfer.peer.is_connected:
            transfer.state = TransferState.FAILED
            transfer.error = f"not done after {seconds:.3f} s"

    def release(self, transfer: NixlTransfer) -> bool:
        """End the transfer. Return False while the read may still be in progress; the caller must
        then try again later."""
        lane = transfer.lane
        if lane is None or transfer.state is TransferState.RELEASED:
            transfer.state = TransferState.RELEASED
            return True
        if not lane.lock.acquire(blocking=False):
            return False
        try:
            if not (_has_ended(transfer) and _free(transfer, lane)):
                return False
            if transfer.handle is not None:
                transfer.peer.num_unreleased[self._lanes.index(lane)] -= 1
            return True
        finally:
            lane.lock.release()

    def estimate_seconds(self, peer: NixlPeer, size_bytes: int) -> float:
        return self._meter.estimate_seconds(peer.endpoint.owner, size_bytes)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.disconnect(peer)
        for lane in self._lanes:
            with lane.lock, contextlib.suppress(Unavailable), _translated_errors("close"):
                lane.agent.deregister_memory(lane.registered)
        self._lanes.clear()


def _check_status(transfer: NixlTransfer) -> str:
    assert transfer.lane is not None
    return str(transfer.lane.agent.check_xfer_state(transfer.handle))


def _has_ended(transfer: NixlTransfer) -> bool:
    if transfer.is_in_progress:
        try:
            with _translated_errors("read"):
                transfer.is_in_progress = _check_status(transfer) == "PROC"
        except Unavailable:
            transfer.is_in_progress = False  # the connection broke, and the read with it
    return not transfer.is_in_progress


def _free(transfer: NixlTransfer, lane: _Lane) -> bool:
    if transfer.handle is not None:
        try:
            with _translated_errors("release"):
                lane.agent.release_xfer_handle(transfer.handle)
        except Unavailable as error:
            transfer.error = str(error)
            return False
    transfer.state = TransferState.RELEASED
    return True


def new_agent(name: str, interfaces: Sequence[str] = (), *, on_device: bool = False) -> Any:
    """Create a NIXL agent with UCX, which opens ``interfaces`` and no other network device.

    Raises Invalid for an interface that this host doesn't have, and Unavailable when none of NIXL's
    packages can be imported or UCX doesn't start."""
    check_interfaces(interfaces)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    for wheel in WHEELS:
        try:
            api = importlib.import_module(f"{wheel}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.ERROR)
        logging.getLogger(wheel).setLevel(logging.ERROR)
        _skip_destructors_at_exit()
        variables = _ucx_settings(interfaces, on_device)
        with _waiting_progress_thread(api.nixlBind), _environment(variables):
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            # Over shared memory UCX can't detect a dead peer; checksums and deadlines do (see the
            # top).
            agent.create_backend(
                "UCX", {"ucx_error_handling_mode": "peer" if interfaces else "none"}
            )
            return agent
    raise Unavailable(f"transport nixl: none of the packages {', '.join(WHEELS)} can be imported")


def check_interfaces(interfaces: Sequence[str]) -> None:
    """Raise Invalid for a network device that this host doesn't have; UCX would silently ignore
    it."""
    present = sorted({path.name for folder in DEVICE_FOLDERS for path in folder.glob("*")})
    for interface in interfaces:
        if interface.partition(":")[0] not in present:
            raise Invalid(
                f"nixl_interfaces: this host has no network device {interface!r}; it has "
                f"{', '.join(present)}",
                param="nixl_interfaces",
            )


def _ucx_settings(interfaces: Sequence[str], on_device: bool) -> dict[str, str]:
    """Return the environment variables for UCX. If ``interfaces`` is not empty, ``UCX_TLS`` in this
    process's environment chooses the UCX transports. If ``interfaces`` is empty, ``UCX_TLS`` is
    overridden with the transports that work within a host, so that UCX never opens a network
    device."""
    if interfaces:
        return {"UCX_NET_DEVICES": ",".join(interfaces)}
    wanted = os.environ.get("UCX_TLS")
    gpu = CUDA_TLS if on_device else GPU_HOST_TLS if GPU_FILE.exists() else ()
    local = ",".join((*LOCAL_TLS, *gpu))
    if wanted not in (None, local):
        log.warning("ucx_tls_ignored", wanted=wanted, used=local, reason="nixl_interfaces is empty")
    return {"UCX_TLS": local}


def _tcp_listeners() -> set[str]:
    """Return the addresses at which this process listens for TCP connections. UCX does not report
    the addresses at which it listens, so they are found by comparing two calls of this function."""
    sockets = psutil.Process().net_connections("tcp")
    return {
        host_port(each.laddr.ip, each.laddr.port)
        for each in sockets
        if each.status == psutil.CONN_LISTEN
    }


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables, for a C library that reads them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _skip_destructors_at_exit() -> None:
    """Make the process exit, with its exit status, without running destructors of C libraries.
    Installed RDMA drivers load the system's libnl besides the wheel's own, and one of them crashes
    in the destructors of the other (status 139 instead of 0)."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


@contextlib.contextmanager
def _waiting_progress_thread(bindings: Any) -> Iterator[None]:
    """Context manager: agents created within it get a progress thread that waits for events. NIXL's
    Python wrapper hardcodes the waiting time as zero, with which the thread would use a whole
    core."""
    original = bindings.nixlAgentConfig

    class WithDelay(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_WAIT_MICROS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = WithDelay
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


def _memory(device: str) -> tuple[str, int]:
    """Return NIXL's name for the kind of memory of ``device``, and the device's number."""
    if device == "cpu":
        return "DRAM", 0
    return "VRAM", int(device.partition(":")[2] or 0)


@contextlib.contextmanager
def _translated_errors(what: str) -> Iterator[None]:
    """Context manager that turns NIXL's exceptions, which have no common base class, into
    Unavailable. ``what`` is the operation, as a verb."""
    try:
        yield
    except (Unavailable, Invalid):
        raise
    except Exception as error:
        raise Unavailable(f"NIXL can't {what}: {type(error).__name__}: {error}") from error
