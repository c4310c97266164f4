"""Transfers KV over shared memory, within one host: the reader maps the peer's memory file, and
copies from it.

A region is in an anonymous memory file, which a peer of the same user opens as
``/proc/<pid>/fd/<fd>``. The kernel frees the file when both processes have closed it or have
exited, for whatever reason. A reused process id is detected by the process's start time. The peer's
claims about its file are checked: only a memory file of the right size that can't shrink is mapped.
"""

import ctypes
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.system.memory_file import memory_file_problem
from baton.transport.base import Capabilities, Region, TransferRange
from baton.transport.copying import CopyTransport, copy_memory

NAME = "shm"
_METADATA = struct.Struct("<IIQ")
"""Process id, file descriptor, and the process's start time in clock ticks since boot."""


@dataclass(slots=True)
class MappedRegion:
    memory: mmap.mmap
    address: int
    view: ctypes.Array[ctypes.c_char]


class ShmTransport(CopyTransport):
    def __init__(self, owner: str, generation: int, clock: Clock, host: str) -> None:
        super().__init__(owner, generation, host, clock, NAME)
        self._mappings: dict[tuple[str, int], MappedRegion] = {}
        self._exported: Endpoint | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(local_only=True, devices=frozenset({"cpu"}), copies_in_post=True)

    def register(self, region: Region) -> None:
        if region.file_descriptor < 0:
            raise Invalid(
                "transport shm can only export memory that is backed by a memory file (memfd); "
                "this region has none"
            )
        super().register(region)

    def export(self) -> Endpoint:
        if self._exported is None:
            pid = os.getpid()
            metadata = _METADATA.pack(pid, self.region.file_descriptor, start_ticks(pid))
            size = self.region.size_bytes
            self._exported = Endpoint(NAME, self.owner, self.generation, self.host, size, metadata)
        return self._exported

    def attach(self, endpoint: Endpoint) -> None:
        if endpoint.host != self.host:
            raise Invalid(
                f"transport shm works only within a host, but {endpoint.owner} is on another host"
            )
        if len(endpoint.metadata) != _METADATA.size:
            raise Invalid(
                f"malformed shm endpoint: its metadata must have {_METADATA.size} bytes, not "
                f"{len(endpoint.metadata)}"
            )
        pid, descriptor, started = _METADATA.unpack(endpoint.metadata)
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # don't open it: that may have side effects
                raise Invalid(f"the file that {endpoint.owner} offers is not a memory file (memfd)")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise Unavailable(f"can't open the memory of {endpoint.owner}: {error}") from error
        try:
            self._map(endpoint, file, pid, started)
        finally:
            os.close(file)

    def _map(self, endpoint: Endpoint, file: int, pid: int, started: int) -> None:
        """Map the file, after checking that it belongs to the peer. The map is writable, since
        ctypes can't take the address of a read-only one; nothing here ever writes to it."""
        if start_ticks(pid) != started:
            raise Unavailable(f"{endpoint.owner} is gone; another process has its process id")
        size = endpoint.region_size_bytes
        problem = memory_file_problem(file, size)
        if problem:
            raise Invalid(f"the memory that {endpoint.owner} offers can't be mapped: {problem}")
        try:
            memory = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError) as error:
            raise Unavailable(f"can't map the memory of {endpoint.owner}: {error}") from error
        view = (ctypes.c_char * size).from_buffer(memory)
        mapping = MappedRegion(memory, ctypes.addressof(view), view)
        self._mappings[endpoint.owner, endpoint.generation] = mapping

    def detach(self, endpoint: Endpoint) -> None:
        mapping = self._mappings.pop((endpoint.owner, endpoint.generation))
        del mapping.view
        mapping.memory.close()

    def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
        source = self._mappings[endpoint.owner, endpoint.generation].address
        target = self.region.address + span.local_offset
        copy_memory(target, source + span.remote_offset, span.size_bytes)


def start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, or 0 if the process does not
    exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
