"""What is known of a local cluster on disk: its state, its lock, its logs."""

import fcntl
import json
import os
import signal
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.core.credentials import ClusterCredentials
from baton.errors import Invalid, NotFound

_WHOLE_FILE = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


@dataclass(slots=True)
class ProcessState:
    """``state`` is a program's (starting, serving, draining, stopped, failed), restarting,
    converting to ``role`` from the other, or pending, while no machine has room for it. The id is a
    name, and tells no role. While starting, ``loaded_bytes`` of ``total_bytes`` of weights are
    there. ``node`` is the machine, empty for this one. ``ops`` is host:port of the ops server, if
    it has one."""

    id: str
    role: str
    pid: int
    state: str
    address: str = ""
    restarts: int = 0
    message: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    node: str = ""
    ops: str = ""
    sockets: list[dict[str, str]] = field(default_factory=list)
    """What it listens on: the fields of a :class:`baton.network.listeners.OpenListener`."""


@dataclass(slots=True)
class ClusterState:
    """As the supervisor last wrote it, with what a command needs to speak to the cluster;
    only its user may read it. ``failure`` says why it gave up."""

    supervisor_pid: int
    url: str
    redis_url: str
    cluster: str
    cluster_secret: str | None = None
    rpc_tls_certificate: str = ""
    rpc_tls_key: str = ""
    rpc_tls_ca: str = ""
    admin_key: str | None = None
    tenant_secret: str = "baton"
    tls_certificate: str | None = None
    ready: bool = False
    failure: str = ""
    processes: list[ProcessState] = field(default_factory=list)

    @property
    def trust(self) -> ClusterCredentials:
        """What its members know each other by."""
        return ClusterCredentials(
            self.cluster_secret, self.rpc_tls_certificate, self.rpc_tls_key, self.rpc_tls_ca
        )


SUPERVISOR_LOG = "supervisor.log"


class ClusterFolder:
    """One cluster's folder below ``home``; its owner is whoever holds the lock."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.path = home / "clusters" / name
        self.logs = self.path / "logs"
        self.socket = self.path / "control.sock"
        self._state = self.path / "state.json"
        self._lock = self.path / "lock"
        self._lock_file: int | None = None

    def take(self) -> None:
        """Becomes the owner. Raises Invalid when somebody is."""
        self.make()
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_record())
        except OSError as error:
            os.close(file)
            raise self.taken() from error
        self._lock_file = file
        self._state.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)
        for log in self.logs.glob("*.log"):
            if log.name != SUPERVISOR_LOG:
                log.replace(log.with_suffix(".log.old"))

    def make(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def taken(self) -> Invalid:
        name = self.path.name
        return Invalid(
            f"a cluster named {name!r} is running already: `baton down --name {name}`, or "
            "choose another --name"
        )

    def release(self) -> None:
        self.socket.unlink(missing_ok=True)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def is_owned(self) -> bool:
        """Whether a supervisor lives. Asks for the lock without taking it."""
        try:
            file = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_record())
        finally:
            os.close(file)
        return bool(struct.unpack(_WHOLE_FILE, answer)[0] != fcntl.F_UNLCK)

    def write(self, state: ClusterState) -> None:
        """Atomic: a reader sees the old state or the new one."""
        new = self._state.with_suffix(".new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as text:
            json.dump(asdict(state), text)
        new.replace(self._state)

    def read(self) -> ClusterState | None:
        """None when nothing was written yet."""
        try:
            raw = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        try:
            raw["processes"] = [ProcessState(**entry) for entry in raw["processes"]]
            return ClusterState(**raw)
        except (TypeError, KeyError):
            return None  # another version wrote it

    def running(self) -> ClusterState:
        """Raises NotFound when there is no running cluster of that name."""
        state = self.read() if self.is_owned() else None
        if state is None:
            raise NotFound(f"no cluster named {self.path.name!r} is running here: `baton up`")
        return state

    def signal_owner(self, number: signal.Signals) -> None:
        try:
            os.kill(self.running().supervisor_pid, number)
        except ProcessLookupError as error:
            raise NotFound(f"the cluster named {self.path.name!r} has just ended") from error


def _lock_record() -> bytes:
    return struct.pack(_WHOLE_FILE, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
