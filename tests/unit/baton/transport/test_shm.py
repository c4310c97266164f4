"""Tests that only a sealed memory file of the announced size is mapped as shared memory."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable

import pytest

from baton.clock import SystemClock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.system.memory_file import create_memory_file
from baton.transport.base import TransferRange, TransferState
from baton.transport.host_memory import HostMemory
from baton.transport.memory_sharing import METADATA, start_ticks
from baton.transport.shm import ShmTransport

SIZE = 4096


def transport(owner: str) -> ShmTransport:
    return ShmTransport(owner, 1, SystemClock(), "here")


def endpoint_of(descriptor: int, size_bytes: int = SIZE, pid: int | None = None) -> Endpoint:
    pid = os.getpid() if pid is None else pid
    metadata = METADATA.pack(pid, descriptor, start_ticks(pid))
    return Endpoint("shm", "liar", 1, "here", size_bytes, metadata)


def shrinking() -> int:
    """Return a file that can shrink: a reader whose mapping extends beyond the file's end would be
    killed by SIGBUS."""
    file = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SIZE)
    return file


def on_disk() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def pipe() -> int:
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


@pytest.mark.parametrize(
    ("make", "size_bytes", "why"),
    [
        (shrinking, SIZE, "not sealed"),
        (on_disk, SIZE, r"not a memory file|not sealed"),
        (pipe, SIZE, "not a memory file"),
        (lambda: socket.socket().detach(), SIZE, "not a memory file"),
        (lambda: os.open("/dev/zero", os.O_RDWR), SIZE, "not a memory file"),
        (lambda: create_memory_file("short", SIZE), 2 * SIZE, "4096 bytes, not 8192"),
        (lambda: create_memory_file("empty", 0), 0, "0 bytes, not 0"),
    ],
)
def test_file_that_is_no_sealed_pool_is_not_mapped(
    make: Callable[[], int], size_bytes: int, why: str
) -> None:
    file = make()
    try:
        with pytest.raises(Invalid, match=why):
            transport("reader").connect(endpoint_of(file, size_bytes))
    finally:
        os.close(file)


def test_missing_file_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        transport("reader").connect(endpoint_of(1 << 20))
    with pytest.raises(Invalid, match="malformed"):
        transport("reader").connect(Endpoint("shm", "liar", 1, "here", SIZE, b"x"))


def test_sealed_pool_can_not_shrink_and_can_be_read() -> None:
    source, reader = HostMemory("source", SIZE), HostMemory("reader", SIZE)
    source.view[:4] = b"good"
    with pytest.raises(PermissionError):
        os.ftruncate(source.file_descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(source.file_descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    sending, receiving = transport("source"), transport("reader")
    sending.register(source.region)
    receiving.register(reader.region)
    peer = receiving.connect(sending.export())
    batch = receiving.prepare(peer, [TransferRange(0, 8, 4)], 1.0)
    receiving.post(batch)
    assert receiving.poll(batch) is TransferState.DONE
    assert bytes(reader.view[8:12]) == b"good"
    receiving.close()
