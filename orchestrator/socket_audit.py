"""What the processes of a running cluster listen on: the kernel's word, beside the programs' own.

A socket is documented if its process has announced it, or if it is one of those that Redis, Ray,
UCX or the supervisor open, which announce nothing. Anything else is nobody's, and is told as such;
so is one that is not as closed as it says.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from baton.core.states import Role
from baton.network.address import host_port
from baton.network.listeners import FILE_PERMISSIONS, LISTENERS, LOOPBACK_ONLY, NO_AUTHENTICATION
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState

NIXL_ROLES = (Role.PREFILL, Role.DECODE, Role.KVSTORE)
"""Whose processes have an agent of NIXL's."""

UCX_WAKEUP = re.compile(r"@[0-9a-f]{1,8}")
RAY_SOCKETS = re.compile(r".*/session_[^/]+/sockets/(raylet|plasma_store)(\.\d+)?")
RAY_PROGRAM = re.compile(r"/ray/core/src/ray/(gcs/gcs_server|raylet/raylet)$")
RAY_LIBRARY = "/ray/_raylet.so"
RAY_MONITOR = "ray/autoscaler/_private/monitor.py"
UNKNOWN = "unknown"

_ACCEPTS_CONNECTIONS = 0x10000
"""A Unix socket's flag in /proc/net/unix (__SO_ACCEPTCON)."""

_DATAGRAM = 2


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """``family`` is tcp, udp or unix; ``address`` is host:port, a path, or @NAME (abstract)."""

    family: str
    address: str

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2] if self.family != "unix" else ""


@dataclass(frozen=True, slots=True)
class SocketReport:
    """One listening socket. ``name`` is its kind's in ``LISTENERS``, empty if it is documented
    nowhere; ``process`` is a program's id, or the name of what it has started."""

    address: str
    protocol: str
    process: str
    authentication: str
    name: str
    documented: bool


def listening_sockets(state: ClusterState, folder: ClusterFolder) -> list[SocketReport]:
    """Of the supervisor and all processes below it, each socket once."""
    owners = {process.pid: process for process in state.processes if process.pid}
    found: dict[tuple[str, str, str], SocketReport] = {}
    for process, owner in _processes(state.supervisor_pid, owners):
        with contextlib.suppress(psutil.Error, OSError):
            title = owner.id if owner is not None else _title(process, state)
            for each in _in_words(open_sockets(process), folder):
                name, authentication = _identity(each, process, owner, state, folder)
                found.setdefault(
                    (each.family, each.address, title), _report(each, title, name, authentication)
                )
    return sorted(found.values(), key=lambda each: (each.process, each.address))


def open_sockets(process: psutil.Process) -> list[OpenSocket]:
    """Where others can connect or send to. Raises psutil.Error and OSError when it has ended."""
    inet = [
        OpenSocket(family, _plain(host_port(each.laddr.ip, each.laddr.port)))
        for family, kind in (("tcp", "tcp"), ("udp", "udp"))
        for each in process.net_connections(kind)
        if each.laddr and (each.status == psutil.CONN_LISTEN if kind == "tcp" else not each.raddr)
    ]
    return [*inet, *_unix_sockets(process.pid)]


def _unix_sockets(pid: int) -> Iterator[OpenSocket]:
    """Those with a name that accept connections, or take datagrams."""
    mine = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(file.readlink()))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or f"socket:[{fields[6]}]" not in mine:
            continue
        takes = int(fields[3], 16) & _ACCEPTS_CONNECTIONS or int(fields[4], 16) == _DATAGRAM
        if takes:
            yield OpenSocket("unix", fields[7])


def _in_words(sockets: list[OpenSocket], folder: ClusterFolder) -> Iterator[OpenSocket]:
    """The supervisor binds its own socket by a shorter name, since addresses end at 107 bytes."""
    short = re.compile(rf"/proc/self/fd/\d+/{re.escape(folder.socket.name)}")
    for each in sockets:
        is_short = each.family == "unix" and short.fullmatch(each.address)
        yield OpenSocket("unix", str(folder.socket)) if is_short else each


def _processes(
    supervisor_pid: int, owners: dict[int, ProcessState]
) -> Iterator[tuple[psutil.Process, ProcessState | None]]:
    """Everything below the supervisor, and of which program of ours it is a part."""
    try:
        top = psutil.Process(supervisor_pid)
        below = top.children(recursive=True)
    except psutil.Error:
        return
    parents = {process.pid: process.ppid() for process in below if process.is_running()}
    for process in (top, *below):
        pid = process.pid
        while pid in parents and pid not in owners:
            pid = parents[pid]
        yield process, owners.get(pid)


def _title(process: psutil.Process, state: ClusterState) -> str:
    return "supervisor" if process.pid == state.supervisor_pid else f"ray: {process.name()}"


def _identity(
    each: OpenSocket,
    process: psutil.Process,
    owner: ProcessState | None,
    state: ClusterState,
    folder: ClusterFolder,
) -> tuple[str, str]:
    """Its name in ``LISTENERS`` and how it authenticates; both empty for nobody's."""
    if owner is not None:
        return _announced(each, owner) or _of_library(each, owner, state) or ("", "")
    if each == OpenSocket("unix", str(folder.socket)):
        return "control", FILE_PERMISSIONS
    return _of_ray(each, process, state) or ("", "")


def _announced(each: OpenSocket, owner: ProcessState) -> tuple[str, str] | None:
    """By its port: a server on all addresses is told in other words by the kernel."""
    for told in owner.sockets:
        if each.family == "unix" and told["address"] == each.address:
            return told["name"], told["authentication"]
        if each.family == "tcp" and told["address"].rpartition(":")[2] == each.port:
            return told["name"], told["authentication"]
    return None


def _of_library(
    each: OpenSocket, owner: ProcessState, state: ClusterState
) -> tuple[str, str] | None:
    if owner.role == Role.REDIS:
        url = urlsplit(state.redis_url)
        if each.family == "tcp" and each.port == str(url.port):
            return "redis", "a password" if url.password else NO_AUTHENTICATION
    has_agent = owner.role in NIXL_ROLES
    if has_agent and each.family == "unix" and UCX_WAKEUP.fullmatch(each.address):
        return "ucx_wakeup", NO_AUTHENTICATION
    return None


def _of_ray(
    each: OpenSocket, process: psutil.Process, state: ClusterState
) -> tuple[str, str] | None:
    """A driver of Ray, which the supervisor is then, listens like Ray's own programs."""
    if each.family == "unix":
        return ("ray_local", FILE_PERMISSIONS) if RAY_SOCKETS.fullmatch(each.address) else None
    command = process.cmdline() or [""]
    if any(word.endswith(RAY_MONITOR) for word in command):
        return "ray_metrics", NO_AUTHENTICATION
    is_driver = process.pid == state.supervisor_pid and _has_loaded(process, RAY_LIBRARY)
    is_program = command[0].startswith("ray::") or RAY_PROGRAM.search(command[0])
    if each.family == "tcp" and (is_driver or is_program):
        return "ray", "Ray's token" if _has_token(process) else NO_AUTHENTICATION
    return None


def _has_loaded(process: psutil.Process, library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


def _has_token(process: psutil.Process) -> bool:
    """A driver has it in an environment that it gives to those whom it starts."""
    for each in (process, *process.children()):
        with contextlib.suppress(psutil.Error):
            if each.environ().get("RAY_AUTH_MODE") == "token":
                return True
    return False


def _report(each: OpenSocket, process: str, name: str, authentication: str) -> SocketReport:
    listener = LISTENERS.get(name)
    documented = listener is not None and authentication in listener.authentications
    if authentication == FILE_PERMISSIONS:
        documented = documented and is_only_owners(Path(each.address))
    if authentication == LOOPBACK_ONLY:
        documented = documented and _on_loopback(each.address)
    protocol = listener.protocol if listener is not None else each.family
    return SocketReport(
        each.address, protocol, process, authentication or UNKNOWN, name, documented
    )


def is_only_owners(path: Path) -> bool:
    """Whether only the user of a path, or of a folder above it, gets there."""
    return any(not place.stat().st_mode & 0o077 for place in (path, *path.parents))


def _on_loopback(address: str) -> bool:
    return ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def _plain(address: str) -> str:
    """An address of IPv4 in IPv6's clothes, as itself."""
    return re.sub(r"^\[::ffff:([0-9.]+)\]", r"\1", address)
