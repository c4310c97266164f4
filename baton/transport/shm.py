"""Transfers KV over shared memory, within one host: the reader maps the peer's memory file, and
copies from it.

A region is in an anonymous memory file, which a peer of the same user opens
(:mod:`baton.transport.memory_sharing`). The kernel frees the file when both processes have closed
it or have exited, for whatever reason. The peer's claims about its file are checked: only a memory
file of the right size, on Linux one that can't shrink, is mapped.
"""

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass

from baton.clock import Clock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.system.memory_file import memory_file_problem
from baton.transport.base import Capabilities, Region, TransferRange
from baton.transport.copying import CopyTransport, copy_memory
from baton.transport.memory_sharing import open_memory_sharing

NAME = "shm"


@dataclass(slots=True)
class MappedRegion:
    memory: mmap.mmap
    address: int
    view: ctypes.Array[ctypes.c_char]


class ShmTransport(CopyTransport):
    """Where opening a peer's file waits for the peer, the first transfer does it, not
    ``connect``, which must not block."""

    def __init__(self, owner: str, generation: int, clock: Clock, host: str) -> None:
        super().__init__(owner, generation, host, clock, NAME)
        self._sharing = open_memory_sharing()
        self._mappings: dict[tuple[str, int], MappedRegion] = {}
        self._opening = threading.Lock()
        self._metadata = b""

    def capabilities(self) -> Capabilities:
        return Capabilities(
            local_only=True,
            devices=frozenset({"cpu"}),
            copies_in_post=True,
            waits_in_post=self._sharing.waits_in_open,
        )

    def register(self, region: Region) -> None:
        if region.file_descriptor < 0:
            raise Invalid(
                "transport shm can only export memory that is backed by a memory file; this region "
                "has none"
            )
        super().register(region)
        self._metadata = self._sharing.offer(region.file_descriptor)

    def export(self) -> Endpoint:
        size = self.region.size_bytes
        return Endpoint(NAME, self.owner, self.generation, self.host, size, self._metadata)

    def attach(self, endpoint: Endpoint) -> None:
        if endpoint.host != self.host:
            raise Invalid(
                f"transport shm works only within a host, but {endpoint.owner} is on another host"
            )
        self._sharing.check(endpoint)
        if not self._sharing.waits_in_open:
            self._open_and_map(endpoint)

    def detach(self, endpoint: Endpoint) -> None:
        mapping = self._mappings.pop((endpoint.owner, endpoint.generation), None)
        if mapping is not None:
            del mapping.view
            mapping.memory.close()

    def copy(self, endpoint: Endpoint, span: TransferRange) -> None:
        source = self._mapping(endpoint).address
        target = self.region.address + span.local_offset
        copy_memory(target, source + span.remote_offset, span.size_bytes)

    def close(self) -> None:
        super().close()
        self._sharing.close()

    def _mapping(self, endpoint: Endpoint) -> MappedRegion:
        key = (endpoint.owner, endpoint.generation)
        if key not in self._mappings:
            with self._opening:
                if key not in self._mappings:
                    self._open_and_map(endpoint)
        return self._mappings[key]

    def _open_and_map(self, endpoint: Endpoint) -> None:
        file = self._sharing.open(endpoint)
        try:
            self._map(endpoint, file)
        finally:
            os.close(file)

    def _map(self, endpoint: Endpoint, file: int) -> None:
        """Map the file, after checking it. The map is writable, since ctypes can't take the address
        of a read-only one; nothing here ever writes to it."""
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
