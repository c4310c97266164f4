"""How a process lets its peers on the host open its memory file: the two ways of transport ``shm``.

A source *offers* its file, and gets the metadata of its endpoint. A reader *opens* the file that
such metadata describes. What a peer claims is checked by the reader; see ``memory_file_problem``.
"""

import os
import stat
import struct
from pathlib import Path
from typing import Protocol

from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.network.listeners import FILE_PERMISSIONS, announce_listener
from baton.system.descriptor_server import DescriptorServer, fetch_descriptor
from baton.system.portability import uses_linux
from baton.system.private_folder import MAX_SOCKET_PATH_BYTES, private_folder

METADATA = struct.Struct("<IIQ")
"""Process id, file descriptor, and the process's start time in clock ticks since boot."""


class MemorySharing(Protocol):
    """Offers at most one file. ``waits_in_open``: whether :meth:`open` may wait for the peer."""

    waits_in_open: bool

    def offer(self, descriptor: int) -> bytes:
        """Let peers open the file. Return the endpoint's metadata. Raises Unavailable."""
        ...

    def check(self, endpoint: Endpoint) -> None:
        """Raise Invalid if the metadata is malformed. Does not block."""
        ...

    def open(self, endpoint: Endpoint) -> int:
        """Open the file of a peer; the caller closes the descriptor. Raises Invalid if it is no
        memory file, Unavailable if the peer is gone."""
        ...

    def close(self) -> None:
        """Stop offering the file. Idempotent."""
        ...


def open_memory_sharing() -> MemorySharing:
    """Return the way that suits this system."""
    return ProcSharing() if uses_linux() else SocketSharing()


class ProcSharing:
    """Linux: a peer of the same user opens ``/proc/<pid>/fd/<descriptor>``. A reused process id is
    detected by the process's start time."""

    waits_in_open = False

    def offer(self, descriptor: int) -> bytes:
        pid = os.getpid()
        return METADATA.pack(pid, descriptor, start_ticks(pid))

    def check(self, endpoint: Endpoint) -> None:
        if len(endpoint.metadata) != METADATA.size:
            raise Invalid(
                f"malformed shm endpoint: its metadata must have {METADATA.size} bytes, not "
                f"{len(endpoint.metadata)}"
            )

    def open(self, endpoint: Endpoint) -> int:
        pid, descriptor, started = METADATA.unpack(endpoint.metadata)
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # don't open it: that may have side effects
                raise Invalid(f"the file that {endpoint.owner} offers is not a memory file (memfd)")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise Unavailable(f"can't open the memory of {endpoint.owner}: {error}") from error
        if start_ticks(pid) != started:
            os.close(file)
            raise Unavailable(f"{endpoint.owner} is gone; another process has its process id")
        return file

    def close(self) -> None:
        """Do nothing: the file is offered for as long as it is open."""


class SocketSharing:
    """Portable: a peer of the same user gets the descriptor over a Unix socket, whose random name
    no other process ever has."""

    waits_in_open = True

    def __init__(self) -> None:
        self._server: DescriptorServer | None = None

    def offer(self, descriptor: int) -> bytes:
        assert self._server is None, "offer() must be called only once"
        self._server = DescriptorServer(private_folder(), descriptor)
        announce_listener("shared_memory", str(self._server.path), FILE_PERMISSIONS)
        return os.fsencode(self._server.path.name)

    def check(self, endpoint: Endpoint) -> None:
        name = endpoint.metadata
        if not 0 < len(name) <= MAX_SOCKET_PATH_BYTES or b"/" in name or b"\0" in name:
            raise Invalid(
                f"malformed shm endpoint: its metadata must be the name of a socket, not {name!r}"
            )

    def open(self, endpoint: Endpoint) -> int:
        try:
            return fetch_descriptor(str(private_folder() / os.fsdecode(endpoint.metadata)))
        except Unavailable as error:
            raise Unavailable(f"can't open the memory of {endpoint.owner}: {error}") from error

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, or 0 if the process does not
    exist."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[19])
