"""Transfers KV between processes of one host whose KV pools are in the memory of a GPU: the reader
maps the peer's pool by CUDA IPC, and copies from it with its own GPU.

Nothing of the peer's takes part in a copy, so a frozen peer does not delay it. The memory can be
mapped only while the peer lives. What a mapping contains after the peer has died is undefined; the
blocks' checksums decide.

A process can map only the memory of GPUs that it sees, and peers choose a transport without knowing
which those are. So a process to which some of the host's GPUs are hidden (``CUDA_VISIBLE_DEVICES``,
as Ray sets it) does not offer this transport.

CUDA exports whole allocations. So an endpoint has the handle of the allocation that contains the
pool, the pool's offset in it, and the GPU's UUID, since GPUs may have other numbers in the reader's
process. The reader asks its own driver how large the mapped allocation is: a read beyond it would
fail with an error that ends every use of the GPU in the reader's process.
"""

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import BatonError, Invalid, Unavailable
from baton.transport.base import Capabilities, Region, TransferRange
from baton.transport.copying import CopyTransport
from baton.transport.cuda_driver import CudaStream, open_stream

NAME = "cuda_ipc"
HOST_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder with an entry for each GPU of the host, visible to this process or not."""

HANDLE_BYTES, UUID_BYTES = 64, 16
_METADATA = struct.Struct(f"<{HANDLE_BYTES}sQ{UUID_BYTES}s")
"""The allocation's handle, the region's offset in it, and the GPU's UUID."""

GROUP_BYTES = 256 * 1024 * 1024
"""Bytes that are read before they are verified, half a millisecond's copy on an H100. Starting the
copy and the verification of a group takes about as long."""

_ENABLE_PEER_ACCESS = 1
"""Flag: if the memory is on another GPU than the reader's, let the reader's access it."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class MappedAllocation:
    """A peer's allocation, mapped at ``base`` in this process; the peer's region begins at
    ``address``."""

    base: int
    address: int


class CudaIpcTransport(CopyTransport):
    def __init__(self, owner: str, generation: int, clock: Clock, host: str) -> None:
        super().__init__(owner, generation, host, clock, NAME)
        self._mappings: dict[tuple[str, int], MappedAllocation] = {}
        self._stream: CudaStream | None = None
        self._exported: Endpoint | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(
            local_only=True,
            devices=frozenset({"cuda"}),
            copies_in_post=True,
            group_bytes=GROUP_BYTES,
        )

    def register(self, region: Region) -> None:
        """Export the allocation that contains ``region``. Raises Unavailable if the driver can't,
        for instance because torch allocates with ``expandable_segments``, or if some of the host's
        GPUs are hidden to this process."""
        super().register(region)
        self._stream = open_stream(region.device)
        visible, present = len(_visible_gpus(self._stream)), len([*HOST_GPUS.glob("*")])
        if visible < present:
            raise Unavailable(
                f"transport {NAME} needs all GPUs of the host, but this process sees {visible} of "
                f"{present}"
            )
        metadata = self._describe(self._stream, region)
        self._exported = Endpoint(
            NAME, self.owner, self.generation, self.host, region.size_bytes, metadata
        )

    def _describe(self, stream: CudaStream, region: Region) -> bytes:
        handle, uuid = _Handle(), (ctypes.c_ubyte * UUID_BYTES)()
        with stream.lock:
            stream.make_current()
            base, _ = _allocation_at(stream, region.address)
            stream.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
            stream.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), stream.handle)
        return _METADATA.pack(bytes(handle.reserved), region.address - base, bytes(uuid))

    def export(self) -> Endpoint:
        assert self._exported is not None, "register() must be called first"
        return self._exported

    def attach(self, endpoint: Endpoint) -> None:
        if endpoint.host != self.host:
            raise Invalid(
                f"transport {NAME} works only within a host, but {endpoint.owner} is on another "
                "host"
            )
        if len(endpoint.metadata) != _METADATA.size:
            raise Invalid(
                f"malformed {NAME} endpoint: its metadata must have {_METADATA.size} bytes, not "
                f"{len(endpoint.metadata)}"
            )
        content, offset, uuid = _METADATA.unpack(endpoint.metadata)
        stream, base = self._opened, ctypes.c_uint64()
        with stream.lock:
            stream.make_current()
            if uuid not in _visible_gpus(stream):
                raise Unavailable(f"the GPU of {endpoint.owner} is not visible in this process")
            handle = _Handle.from_buffer_copy(content)
            stream.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, _ENABLE_PEER_ACCESS)
            try:
                _check_region(stream, base.value, offset, endpoint.region_size_bytes)
            except BatonError:
                stream.call("cuIpcCloseMemHandle", base)
                raise
        mapping = MappedAllocation(base.value, base.value + offset)
        self._mappings[endpoint.owner, endpoint.generation] = mapping

    def detach(self, endpoint: Endpoint) -> None:
        mapping = self._mappings.pop((endpoint.owner, endpoint.generation))
        stream = self._opened
        with stream.lock, contextlib.suppress(Unavailable):  # the peer may be gone
            stream.make_current()
            stream.call("cuIpcCloseMemHandle", ctypes.c_uint64(mapping.base))

    def copy_all(self, endpoint: Endpoint, ranges: Sequence[TransferRange]) -> None:
        source = self._mappings[endpoint.owner, endpoint.generation].address
        target, stream = self.region.address, self._opened
        with stream.lock:
            stream.make_current()
            for span in ranges:
                stream.call(
                    "cuMemcpyDtoDAsync_v2",
                    target + span.local_offset,
                    source + span.remote_offset,
                    span.size_bytes,
                    stream.stream,
                )
            stream.synchronize()

    @property
    def _opened(self) -> CudaStream:
        assert self._stream is not None, "register() must be called first"
        return self._stream


def _allocation_at(stream: CudaStream, address: int) -> tuple[int, int]:
    """Return the address and the size of the allocation that contains ``address``, as the driver
    knows it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    stream.call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base),
        ctypes.byref(size),
        ctypes.c_uint64(address),
    )
    return base.value, size.value


def _check_region(stream: CudaStream, mapped: int, offset: int, region_bytes: int) -> None:
    """Raise Invalid unless the region, which a peer says begins ``offset`` bytes after ``mapped``,
    lies within the allocation that is mapped there."""
    base, size = _allocation_at(stream, mapped)
    if mapped + offset + region_bytes > base + size:
        raise Invalid(
            f"malformed {NAME} endpoint: a region of {region_bytes} bytes at {offset} does not fit "
            f"into the allocation, of which {base + size - mapped} bytes are mapped"
        )


def _visible_gpus(stream: CudaStream) -> set[bytes]:
    """Return the UUIDs of the GPUs that this process may use."""
    count, found = ctypes.c_int(), set()
    stream.call("cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * UUID_BYTES)()
        stream.call("cuDeviceGet", ctypes.byref(device), ordinal)
        stream.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        found.add(bytes(uuid))
    return found
