"""Tests that the setting ``portable`` switches off everything that only Linux has."""

import subprocess
import sys

import pytest

from baton.clock import SystemClock
from baton.config import load_settings
from baton.engine.native.backend_choice import unavailable_reason
from baton.engine.native.processor import supported_instruction_sets
from baton.errors import Invalid
from baton.system.portability import describe_facilities, uses_linux
from baton.transport.base import Region
from baton.transport.selection import open_transports, preferred_transports
from tests.facilities import ON_LINUX, facilities

WITHOUT_LINUX = """
import fcntl, mmap, os, resource, signal, socket, time

for module, names in {
    os: ["memfd_create", "posix_fallocate", "posix_fadvise", "preadv", "sched_getaffinity",
         "sched_setaffinity", "eventfd", "pidfd_open", "splice", "copy_file_range",
         *[name for name in dir(os) if name.startswith(("MFD_", "POSIX_FADV_"))]],
    fcntl: [name for name in dir(fcntl) if name.startswith(("F_SEAL", "F_OFD"))]
           + ["F_ADD_SEALS", "F_GET_SEALS"],
    mmap: ["MADV_HUGEPAGE", "MAP_POPULATE"],
    resource: ["prlimit"],
    signal: ["pidfd_send_signal"],
    socket: ["SO_PEERCRED", "MSG_CMSG_CLOEXEC"],
    time: ["pthread_getcpuclockid"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

from baton.config import load_settings
load_settings(portable=True)
import command_line.main, command_line.doctor, command_line.up, command_line.worker_program
import conductor.program, kvstore.program, orchestrator.socket_audit, router.program
from baton.clock import SystemClock
from baton.system.host import host_id
from baton.transport.base import TransferRange, TransferState
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports

memories = [HostMemory(name, 4096) for name in ("source", "reader")]
memories[0].view[:4] = b"good"
source, reader = (
    open_transports([], owner=str(index), generation=1, region=memory.region, clock=SystemClock(),
                    listen_host="127.0.0.1")
    for index, memory in enumerate(memories)
)
assert list(source) == ["shm", "grpc"], source
for name in source:
    memories[1].view[:4] = b"...."
    peer = reader[name].connect(source[name].export())
    batch = reader[name].prepare(peer, [TransferRange(0, 0, 4)], 10.0)
    reader[name].post(batch)
    while reader[name].poll(batch) is TransferState.PENDING:
        pass
    assert bytes(memories[1].view[:4]) == b"good", (name, batch)
    reader[name].release(batch)
for each in (*source.values(), *reader.values()):
    each.close()
"""


def test_programs_and_transports_work_without_what_only_linux_has() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_LINUX], check=True, timeout=100)


@pytest.mark.skipif(not ON_LINUX, reason="nothing to choose from")
def test_the_setting_chooses_the_facilities() -> None:
    with facilities(is_portable=False):
        load_settings(portable=True)
        assert not uses_linux()
        assert describe_facilities() == (
            "portable facilities, because the setting portable is true"
        )
        load_settings()
        assert uses_linux()


def test_torch_computes_where_the_processor_is_not_known() -> None:
    with facilities(is_portable=True):
        assert supported_instruction_sets() == []
        assert str(unavailable_reason()).startswith("this process uses portable facilities")


def test_transports_are_those_that_exist() -> None:
    with facilities(is_portable=True):
        assert preferred_transports("cpu") == ["shm", "grpc"]
        assert preferred_transports("cuda") == ["grpc"]
        with pytest.raises(Invalid, match=r"transport nixl needs Linux, .* choose from shm, grpc"):
            open_transports(
                ["nixl"], owner="a", generation=1, region=Region(0, 1), clock=SystemClock(),
                listen_host="127.0.0.1",
            )  # fmt: skip
        with pytest.raises(Invalid, match="nixl_interfaces is eth0, but NIXL needs Linux"):
            open_transports(
                [], owner="a", generation=1, region=Region(0, 1), clock=SystemClock(),
                listen_host="127.0.0.1", nixl_interfaces=["eth0"],
            )  # fmt: skip
    if ON_LINUX:
        with facilities(is_portable=False):
            assert preferred_transports("cuda") == ["cuda_ipc", "nixl", "grpc"]
