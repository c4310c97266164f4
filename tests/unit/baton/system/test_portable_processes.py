"""Tests of what a process does for its children, sockets and files where Linux's own facilities are
not used."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.config import DEMO_MODEL
from baton.errors import Invalid
from baton.pools.control_client import short_socket_path
from baton.system.disk_file import read_into, reserve_space
from baton.system.memory_watch import MemoryWatch
from baton.system.peer_user import is_same_user, peer_user
from baton.system.thread_clock import ThreadClock
from baton.text.grammar import checker as grammar_checker
from baton.text.grammar.checker import GrammarChecker
from tests.facilities import FACILITIES, ON_LINUX, facilities
from tests.unit.baton.text.grammar.test_grammar_checker import CONJUNCTION

PARENT = """
import subprocess, sys
from baton.system.portability import set_portable
set_portable(sys.argv[1] == "portable")
from baton.system.child_guard import CHILD_GUARD
sleep = [sys.executable, "-c", "import signal; signal.pause()"]
children = [
    subprocess.Popen(sleep, preexec_fn=hook, start_new_session=True, stdout=subprocess.DEVNULL)
    for hook in (CHILD_GUARD.hook(), None)
]
CHILD_GUARD.forget(children[1].pid)
guard = CHILD_GUARD._guard
print(*[child.pid for child in children], guard.pid if guard else 0, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=FACILITIES)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with facilities(request.param == "portable"):
        yield request.param


def test_guarded_children_die_with_their_parent(way: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    guarded, other, guard = (int(pid) for pid in parent.stdout.readline().split())
    assert bool(guard) == (way == "portable")
    watched = [psutil.Process(pid) for pid in (guarded, guard) if pid]
    parent.kill()
    parent.communicate()
    psutil.wait_procs(watched)  # the test's timeout bounds this
    assert psutil.pid_exists(other)
    os.kill(other, signal.SIGKILL)


def test_a_killed_guard_is_replaced() -> None:
    code = (
        "import os; from baton.system.portability import set_portable; set_portable(True); "
        "from baton.system.child_guard import CHILD_GUARD as guard; "
        "guard.hook(); first = guard._guard; first.kill(); first.wait(); guard.forget(1); "
        "assert guard._guard.pid != first.pid and guard._guard.poll() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_user_of_a_connection_is_checked(way: str) -> None:
    ends = socket.socketpair(socket.AF_UNIX)
    is_known = way == "linux" or not ON_LINUX  # glibc has no getpeereid
    assert peer_user(ends[0]) == (os.getuid() if is_known else None)
    assert is_same_user(ends[0], os.getuid())
    assert is_same_user(ends[0], os.getuid() + 1) != is_known
    for end in ends:
        end.close()


def test_a_control_socket_may_have_a_long_path(way: str, tmp_path: Path) -> None:
    path = tmp_path / ("folder" * 30) / "control.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with short_socket_path(path) as name:
            listener.bind(name)
        listener.listen()
        with short_socket_path(path) as name:
            client.connect(name)
    assert path.is_socket()
    assert not Path(name).parent.is_symlink()


def test_space_is_reserved_and_read(way: str, tmp_path: Path) -> None:
    size = (1 << 20) + 17
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    reserve_space(file, size)
    status = os.fstat(file)
    assert status.st_size == size and status.st_blocks * 512 >= size
    os.pwrite(file, b"abc", size - 3)
    buffer = bytearray(b"....")
    assert read_into(file, memoryview(buffer), size - 3) == 3
    assert buffer == b"abc."
    os.close(file)


def test_the_clock_of_a_thread_counts_what_can_be_read(way: str) -> None:
    clock = ThreadClock()
    assert clock.is_cpu_time == (way == "linux")
    assert clock.seconds() <= clock.seconds()


def test_growth_of_a_process_is_seen() -> None:
    code = "import sys; data = bytearray(sys.stdin.buffer.read(1)) * (1 << 25); print(flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    watch = MemoryWatch(process.pid)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    process.stdout.readline()
    assert watch.has_grown_by(1 << 24)
    process.communicate()
    assert not watch.has_grown_by(0)


async def test_a_grammar_that_takes_too_much_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checker, "MEMORY_BYTES", 0)
    with facilities(is_portable=True):
        checker = GrammarChecker.for_model(DEMO_MODEL, 4096, [0])
        with pytest.raises(Invalid, match="MiB to compile"):
            await checker.check(CONJUNCTION, "mallory")
        checker.close()
