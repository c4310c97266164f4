"""Tests that ``baton doctor --sockets`` compares the kernel's list of sockets with those that the
processes report, and that the documented table of sockets is up to date."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from baton.core.credentials import ClusterCredentials
from baton.network.listeners import (
    LISTENERS,
    LOOPBACK_ONLY,
    NO_AUTHENTICATION,
    OpenListener,
    member_authentication,
)
from baton.rpc.framed.server import FramedServer
from baton.serve.status_pipe import open_status_pipe, parse_listener
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState
from orchestrator.socket_audit import SocketReport, is_private_to_owner, listening_sockets
from tools.socket_table import PAGE, filled

PROGRAM = """
import json, os, socket, sys
folder = sys.argv[1]
opened = {name: socket.socket(*kind) for name, kind in {
    "reported": (socket.AF_INET, socket.SOCK_STREAM),
    "unreported": (socket.AF_INET, socket.SOCK_STREAM),
    "datagrams": (socket.AF_INET, socket.SOCK_DGRAM), "connected": (socket.AF_INET,),
    "wide": (socket.AF_INET, socket.SOCK_STREAM), "local": (socket.AF_UNIX,),
    "wakeup": (socket.AF_UNIX, socket.SOCK_DGRAM), "stranger": (socket.AF_UNIX, socket.SOCK_DGRAM),
}.items()}
for name in ("reported", "unreported", "datagrams"):
    opened[name].bind(("127.0.0.1", 0))
opened["wide"].bind(("0.0.0.0", 0))
opened["local"].bind(f"{folder}/local.sock")
opened["wakeup"].bind("\\0a1b2c")
opened["stranger"].bind("\\0somebody")
for name in ("reported", "unreported", "wide", "local"):
    opened[name].listen()
opened["connected"].connect(opened["reported"].getsockname())
names = ("reported", "unreported", "datagrams", "wide")
print(json.dumps({name: opened[name].getsockname()[1] for name in names}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[int, dict[str, int]]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        yield process.pid, json.loads(process.stdout.readline())
        process.stdin.close()


def reports(
    tmp_path: Path, pid: int, role: str, reported: list[OpenListener]
) -> dict[str, SocketReport]:
    owner = ProcessState("one", role, pid, "serving", sockets=[asdict(each) for each in reported])
    state = ClusterState(os.getpid(), "", "redis://:pw@127.0.0.1:1", "c", processes=[owner])
    found = listening_sockets(state, ClusterFolder(tmp_path, "c"))
    return {each.address: each for each in found if each.process == "one"}


def test_unreported_sockets_are_listed_as_undocumented(
    tmp_path: Path, program: tuple[int, dict[str, int]]
) -> None:
    pid, ports = program
    address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    wide, local = f"0.0.0.0:{ports['wide']}", f"{tmp_path}/local.sock"
    (tmp_path / "local.sock").chmod(0o600)
    reported = [
        OpenListener("grpc", address["reported"], member_authentication(ClusterCredentials("s"))),
        OpenListener("framed", wide, LOOPBACK_ONLY),
        OpenListener("local_rpc", local, LISTENERS["local_rpc"].authentications[0]),
    ]
    found = reports(tmp_path, pid, "decode", reported)
    assert {place: each.is_documented for place, each in found.items()} == {
        address["reported"]: True,
        address["unreported"]: False,
        address["datagrams"]: False,
        wide: False,  # reported as listening on loopback only, which is wrong
        local: True,
        "@a1b2c": True,
        "@somebody": False,
    }
    assert found[address["reported"]].authentication == "the cluster secret"
    assert found[address["unreported"]].authentication == "unknown"
    assert found["@a1b2c"].authentication == NO_AUTHENTICATION
    assert not reports(tmp_path, pid, "router", reported)["@a1b2c"].is_documented


def test_path_is_private_by_its_own_or_its_folders_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o666)
    tmp_path.chmod(0o700)
    assert is_private_to_owner(file)
    assert not is_private_to_owner(Path("/etc/passwd"))


async def test_program_reports_its_listeners_to_the_supervisor() -> None:
    read_end, write_end = os.pipe()
    open_status_pipe(write_end)
    try:
        lines = FramedServer(ClusterCredentials("s"), {})
        port = await lines.listen("127.0.0.1", 0)
        listener = parse_listener(os.read(read_end, 4096).decode())
        assert listener == OpenListener("framed", f"127.0.0.1:{port}", "the cluster secret")
        await lines.close()
    finally:
        open_status_pipe(-1)
        os.close(read_end)
        os.close(write_end)


def test_documented_socket_table_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "python -m tools.socket_table"
