"""Compares a running cluster's listening sockets, as seen in the kernel, with the documented ones.

A socket is documented if its process has announced it, or if it is one of those that Redis, Ray,
UCX, vLLM or the supervisor open without announcing them. Any other socket is reported as
undocumented, and so is a socket that is less protected than announced. In a worker with vLLM, any
TCP socket on loopback that was not announced is assumed to belong to the worker's vLLM server.
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
from baton.core.worker_kinds import runs_engine
from baton.network.address import host_port
from baton.network.listeners import FILE_PERMISSIONS, LISTENERS, LOOPBACK_ONLY, NO_AUTHENTICATION
from baton.system.portability import uses_linux
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState

UCX_WAKEUP = re.compile(r"@[0-9a-f]{1,8}")
VLLM_SOCKETS = re.compile(r".*/baton-vllm-[^/]+/[^/]+")
VLLM_LIBRARY = re.compile(r"/(site|dist)-packages/vllm/")
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
    """A socket. ``family`` is tcp, udp or unix; ``address`` is host:port, a path, or @NAME for an
    abstract Unix socket."""

    family: str
    address: str

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2] if self.family != "unix" else ""


@dataclass(frozen=True, slots=True)
class SocketReport:
    """One listening socket. ``name`` is its name in ``LISTENERS``, empty if it is not documented.
    ``process`` is the id of one of Baton's processes, or the name of a process that Baton
    started."""

    address: str
    protocol: str
    process: str
    authentication: str
    name: str
    is_documented: bool


def listening_sockets(state: ClusterState, folder: ClusterFolder) -> list[SocketReport]:
    """Return the sockets of the supervisor and of all its descendant processes, each once."""
    owners = {process.pid: process for process in state.processes if process.pid}
    found: dict[tuple[str, str, str], SocketReport] = {}
    for process, owner in _processes(state.supervisor_pid, owners):
        with contextlib.suppress(psutil.Error, OSError):
            title = owner.id if owner is not None else _title(process, state)
            for each in _with_full_path(open_sockets(process), folder):
                name, authentication = _identity(each, process, owner, state, folder)
                found.setdefault(
                    (each.family, each.address, title), _report(each, title, name, authentication)
                )
    return sorted(found.values(), key=lambda each: (each.process, each.address))


def open_sockets(process: psutil.Process) -> list[OpenSocket]:
    """Return the sockets to which other processes can connect or send data. Raises psutil.Error or
    OSError if the process has exited."""
    inet = [
        OpenSocket(family, _plain(host_port(each.laddr.ip, each.laddr.port)))
        for family, kind in (("tcp", "tcp"), ("udp", "udp"))
        for each in process.net_connections(kind)
        if each.laddr and (each.status == psutil.CONN_LISTEN if kind == "tcp" else not each.raddr)
    ]
    unix = _unix_sockets(process.pid) if uses_linux() else _portable_unix_sockets(process)
    return [*inet, *unix]


def _portable_unix_sockets(process: psutil.Process) -> Iterator[OpenSocket]:
    """Yield the named Unix sockets. Those of accepted connections have the listener's name."""
    for each in process.net_connections("unix"):
        if isinstance(each.laddr, str) and each.laddr:
            yield OpenSocket("unix", each.laddr)


def _unix_sockets(pid: int) -> Iterator[OpenSocket]:
    """Yield the named Unix sockets that accept connections or receive datagrams."""
    own_sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own_sockets.add(str(file.readlink()))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or f"socket:[{fields[6]}]" not in own_sockets:
            continue
        if int(fields[3], 16) & _ACCEPTS_CONNECTIONS or int(fields[4], 16) == _DATAGRAM:
            yield OpenSocket("unix", fields[7])


def _with_full_path(sockets: list[OpenSocket], folder: ClusterFolder) -> Iterator[OpenSocket]:
    """Replace the short path of the supervisor's own socket by its full path. The supervisor binds
    the short path, since addresses of Unix sockets are limited to 107 bytes."""
    name = re.escape(folder.control_socket.name)
    short = re.compile(rf"/proc/self/fd/\d+/{name}|.*/baton-[^/]+/c/{name}")
    for each in sockets:
        is_short = each.family == "unix" and short.fullmatch(each.address)
        yield OpenSocket("unix", str(folder.control_socket)) if is_short else each


def _processes(
    supervisor_pid: int, owners: dict[int, ProcessState]
) -> Iterator[tuple[psutil.Process, ProcessState | None]]:
    """Yield the supervisor and all its descendant processes, each with the state of the Baton
    process that it belongs to, if any."""
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
    """Return the socket's name in ``LISTENERS`` and its authentication. Both are empty if the
    socket is unknown."""
    if owner is not None:
        return (
            _match_announced(each, owner)
            or _match_library(each, owner, state)
            or _match_vllm(each, process, owner)
            or ("", "")
        )
    if each == OpenSocket("unix", str(folder.control_socket)):
        return "control", FILE_PERMISSIONS
    return _match_ray(each, process, state) or ("", "")


def _match_announced(each: OpenSocket, owner: ProcessState) -> tuple[str, str] | None:
    """Find a socket among those that its process announced; return its name and authentication, or
    None if it was not announced. TCP sockets are matched by port, since the kernel shows a wildcard
    address in a different form."""
    for announced in owner.sockets:
        if each.family == "unix" and announced["address"] == each.address:
            return announced["name"], announced["authentication"]
        if each.family == "tcp" and announced["address"].rpartition(":")[2] == each.port:
            return announced["name"], announced["authentication"]
    return None


def _match_library(
    each: OpenSocket, owner: ProcessState, state: ClusterState
) -> tuple[str, str] | None:
    if owner.role == Role.REDIS:
        url = urlsplit(state.redis_url)
        if each.family == "tcp" and each.port == str(url.port):
            return "redis", "a password" if url.password else NO_AUTHENTICATION
    has_agent = runs_engine(owner.role) or owner.role == Role.KVSTORE
    if has_agent and each.family == "unix" and UCX_WAKEUP.fullmatch(each.address):
        return "ucx_wakeup", NO_AUTHENTICATION
    return None


def _match_vllm(
    each: OpenSocket, process: psutil.Process, owner: ProcessState
) -> tuple[str, str] | None:
    """Identify a socket of the vLLM server that a worker has started. Return its name and
    authentication, or None if it is not vLLM's."""
    if not runs_engine(owner.role) or not VLLM_LIBRARY.search(_mapped_files(process)):
        return None
    if each.family == "unix":
        return ("vllm_local", FILE_PERMISSIONS) if VLLM_SOCKETS.fullmatch(each.address) else None
    return ("vllm", LOOPBACK_ONLY) if each.family == "tcp" else None


def _match_ray(
    each: OpenSocket, process: psutil.Process, state: ClusterState
) -> tuple[str, str] | None:
    """Identify a socket that belongs to one of Ray's own processes, or to Ray's driver, which is
    the supervisor. Return its name and authentication, or None if it is not Ray's."""
    if each.family == "unix":
        return ("ray_local", FILE_PERMISSIONS) if RAY_SOCKETS.fullmatch(each.address) else None
    command = process.cmdline() or [""]
    if any(word.endswith(RAY_MONITOR) for word in command):
        return "ray_metrics", NO_AUTHENTICATION
    is_driver = process.pid == state.supervisor_pid and _is_ray_driver(process)
    is_program = command[0].startswith("ray::") or RAY_PROGRAM.search(command[0])
    if each.family == "tcp" and (is_driver or is_program):
        return "ray", "Ray's token" if _has_token(process) else NO_AUTHENTICATION
    return None


def _mapped_files(process: psutil.Process) -> str:
    """Return the paths of the files that a process has mapped, among other text. It is empty
    without /proc, where vLLM does not run either."""
    return Path(f"/proc/{process.pid}/maps").read_text() if uses_linux() else ""


def _is_ray_driver(process: psutil.Process) -> bool:
    """Whether a process uses Ray. Without /proc, one that has started Ray is recognized, but not
    one that uses a Ray that was running before."""
    if uses_linux():
        return RAY_LIBRARY in _mapped_files(process)
    programs = [each.cmdline() or [""] for each in process.children()]
    return any(RAY_PROGRAM.search(command[0]) for command in programs)


def _has_token(process: psutil.Process) -> bool:
    """Whether Ray uses token authentication. The supervisor (Ray's driver) sets ``RAY_AUTH_MODE``
    while it runs. Its own environment is read as it was at its start, so only the environments of
    its children show the variable."""
    for each in (process, *process.children()):
        with contextlib.suppress(psutil.Error):
            if each.environ().get("RAY_AUTH_MODE") == "token":
                return True
    return False


def _report(each: OpenSocket, process: str, name: str, authentication: str) -> SocketReport:
    listener = LISTENERS.get(name)
    documented = listener is not None and authentication in listener.authentications
    if authentication == FILE_PERMISSIONS:
        documented = documented and is_private_to_owner(Path(each.address))
    if authentication == LOOPBACK_ONLY:
        documented = documented and _on_loopback(each.address)
    protocol = listener.protocol if listener is not None else each.family
    return SocketReport(
        each.address, protocol, process, authentication or UNKNOWN, name, documented
    )


def is_private_to_owner(path: Path) -> bool:
    """Whether a path, or a folder above it, is accessible only to its owner."""
    return any(not place.stat().st_mode & 0o077 for place in (path, *path.parents))


def _on_loopback(address: str) -> bool:
    return ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def _plain(address: str) -> str:
    """Return an IPv4-mapped IPv6 address as IPv4, and any other address unchanged."""
    return re.sub(r"^\[::ffff:([0-9.]+)\]", r"\1", address)
