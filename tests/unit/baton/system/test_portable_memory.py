"""Tests of shared memory where there are no memory files: it has no name, its descriptor is passed
over a socket, and nothing is left when its owner is killed."""

import errno
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.core.kv_transfer import Endpoint
from baton.errors import Invalid, Unavailable
from baton.system import descriptor_server
from baton.system.descriptor_server import DescriptorServer, fetch_descriptor
from baton.system.host import available_memory_bytes, host_id
from baton.system.memory_file import create_memory_file, memory_file_problem
from baton.system.unix_socket import listen_privately
from baton.transport import memory_sharing
from baton.transport.base import TransferRange, TransferState
from baton.transport.host_memory import HostMemory
from baton.transport.shm import ShmTransport
from tests.facilities import ON_LINUX, facilities

SIZE = 2 * mmap.PAGESIZE
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    with facilities(is_portable=True):
        yield


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path, because that of a socket has 100 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="baton-") as name:
        yield Path(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's sockets."""
    monkeypatch.setattr(memory_sharing, "private_folder", lambda: tmp_path / "sockets")
    return tmp_path / "sockets"


def test_shared_memory_has_no_name_and_is_not_inherited() -> None:
    before = set(SHARED_MEMORY.glob("baton-*"))
    file = create_memory_file("any", SIZE)
    try:
        assert set(SHARED_MEMORY.glob("baton-*")) == before
        assert not os.get_inheritable(file)
        assert os.pread(file, SIZE, 0) == bytes(SIZE)
        assert memory_file_problem(file, SIZE) == ""
        for wrong in (0, SIZE - mmap.PAGESIZE, SIZE + 1):
            assert memory_file_problem(file, wrong) == f"it has {SIZE} bytes, not {wrong}"
    finally:
        os.close(file)


def test_shared_memory_that_does_not_fit_is_refused() -> None:
    """Otherwise the process would die of SIGBUS when it touches the memory."""
    with pytest.raises(
        OSError, match=r"shared memory has .* free bytes, but .* are needed"
    ) as full:
        create_memory_file("any", 1 << 60)
    assert full.value.errno == errno.ENOSPC


def test_each_peer_gets_a_descriptor_of_the_same_file(tmp_path: Path) -> None:
    file = create_memory_file("any", SIZE)
    server = DescriptorServer(tmp_path / "sockets", file)
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    for byte in (b"x", b"y"):
        received = fetch_descriptor(str(server.path))
        assert not os.get_inheritable(received)
        os.pwrite(received, byte, 0)
        assert os.pread(file, 1, 0) == byte
        os.close(received)
    server.close()
    server.close()
    assert not server.path.exists()
    with pytest.raises(Unavailable, match="no descriptor from"):
        fetch_descriptor(str(server.path))
    os.close(file)


def test_a_frozen_peer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_server, "FETCH_SECONDS", 0.05)
    path = tmp_path / "sockets" / "frozen.sock"
    with listen_privately(path), pytest.raises(Unavailable, match="timed out"):
        fetch_descriptor(str(path))


def test_the_socket_of_a_killed_owner_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    code = (
        "import os, sys; from pathlib import Path; "
        "from baton.system.descriptor_server import DescriptorServer; "
        "print(DescriptorServer(Path(sys.argv[1]), 0).path.name, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    dead = owner.stdout.readline().decode().strip()
    alive = listen_privately(folder / "alive.sock")
    assert {path.name for path in folder.glob("*.sock")} == {"alive.sock", dead}
    owner.kill()
    owner.communicate()
    with listen_privately(folder / "new.sock"):
        assert {path.name for path in folder.glob("*.sock")} == {"alive.sock", "new.sock"}
    alive.close()


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(Unavailable, match="must be a folder that no other user may open"):
        listen_privately(tmp_path / "x.sock")
    with pytest.raises(Unavailable, match="too long"):
        listen_privately(tmp_path / ("x" * 100) / "x.sock")


def transport(owner: str) -> ShmTransport:
    return ShmTransport(owner, 1, SystemClock(), "here")


def test_the_first_transfer_opens_the_memory_of_the_peer(folder: Path) -> None:
    source, reader = HostMemory("source", SIZE), HostMemory("reader", SIZE)
    source.view[:4] = b"good"
    sending, receiving = transport("source"), transport("reader")
    sending.register(source.region)
    receiving.register(reader.region)
    assert receiving.capabilities().waits_in_post
    peer = receiving.connect(sending.export())
    for offset in (8, 16):
        batch = receiving.prepare(peer, [TransferRange(0, offset, 4)], 1.0)
        receiving.post(batch)
        assert receiving.poll(batch) is TransferState.DONE
        assert bytes(reader.view[offset : offset + 4]) == b"good"
        sending.close()  # the memory stays open
    receiving.disconnect(peer)
    receiving.close()
    assert list(folder.glob("*.sock")) == []


def test_the_transfer_from_a_peer_that_is_gone_fails(folder: Path) -> None:
    memory = HostMemory("memory", SIZE)
    sending, receiving = transport("source"), transport("reader")
    sending.register(memory.region)
    receiving.register(memory.region)
    peer = receiving.connect(sending.export())
    sending.close()
    batch = receiving.prepare(peer, [TransferRange(0, 0, 4)], 1.0)
    receiving.post(batch)
    assert receiving.poll(batch) is TransferState.FAILED
    assert "can't open the memory of source" in batch.error
    receiving.close()


@pytest.mark.parametrize("metadata", [b"", b"../x.sock", b"a\0b", b"x" * 101])
def test_malformed_metadata_is_refused(metadata: bytes) -> None:
    with pytest.raises(Invalid, match="must be the name of a socket"):
        transport("reader").connect(Endpoint("shm", "liar", 1, "here", SIZE, metadata))


def test_memory_of_the_wrong_size_is_not_mapped(folder: Path) -> None:
    memory = HostMemory("memory", SIZE)
    sending, receiving = transport("source"), transport("reader")
    sending.register(memory.region)
    receiving.register(memory.region)
    honest = sending.export()
    peer = receiving.connect(
        Endpoint("shm", "liar", 1, "here", SIZE + mmap.PAGESIZE, honest.metadata)
    )
    batch = receiving.prepare(peer, [TransferRange(0, 0, 4)], 1.0)
    receiving.post(batch)
    assert receiving.poll(batch) is TransferState.FAILED
    assert f"it has {SIZE} bytes, not {SIZE + mmap.PAGESIZE}" in batch.error
    sending.close()
    receiving.close()


def test_processes_with_the_same_private_folder_are_on_one_host(tmp_path: Path) -> None:
    def host_of_process(temporary: Path) -> str:
        code = (
            "from baton.system.portability import set_portable; set_portable(True); "
            "from baton.system.host import host_id; print(host_id())"
        )
        environment = {**os.environ, "TMPDIR": str(temporary)}
        return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)

    (tmp_path / "other").mkdir()
    first = host_of_process(tmp_path)
    assert host_of_process(tmp_path) == first
    assert host_of_process(tmp_path / "other") != first
    assert first.startswith(f"{socket.gethostname()}/")
    if ON_LINUX:
        with facilities(is_portable=False):
            assert host_id() != first.strip()


def test_available_memory_is_about_the_same_in_both_ways() -> None:
    portable = available_memory_bytes()
    with facilities(is_portable=False):
        assert 0.5 < portable / available_memory_bytes() < 2
