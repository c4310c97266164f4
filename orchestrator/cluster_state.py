"""The files of a local cluster: its state, lock and logs."""

import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.core.credentials import ClusterCredentials
from baton.errors import Invalid, NotFound, Unavailable

LOCK_ATTEMPTS, LOCK_RETRY_SECONDS = 10, 0.01
"""A process that only tests the lock holds it for some microseconds; so one attempt may fail."""


@dataclass(slots=True)
class ProcessState:
    """The state of one process. ``state`` is the one that the process reports (starting, serving,
    draining, stopped, failed), or restarting, or converting (to ``role`` from another worker
    role), or pending (while no machine has the resources for it). After a conversion, the id still
    contains the previous role. While the process is starting, ``loaded_bytes`` of the
    ``total_bytes`` of weights are loaded. ``node`` is the machine; empty for the supervisor's
    machine. ``ops`` is host:port of the ops server, if there is one."""

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
    """The process's listening sockets, each as the fields of a
    :class:`baton.network.listeners.OpenListener`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How the process's settings differ from those at its start: the fields of a
    :class:`baton.serve.settings_watcher.SettingsStatus` that are not empty."""


@dataclass(slots=True)
class ClusterState:
    """The cluster's state as the supervisor last wrote it, with the addresses and secrets that
    ``baton`` commands need; only the user's own account may read it. ``failure`` is the reason why
    the supervisor gave up, ``obstacle`` the reason why the cluster is not ready although all
    processes serve. ``models`` are the models by name: folders, or ``owner/name@COMMIT`` of
    the Hugging Face hub. ``settings`` describes how the supervisor's settings differ from those
    at its start, in the form of :attr:`ProcessState.settings`."""

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
    obstacle: str = ""
    models: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    lost_writes: dict[str, int] = field(default_factory=dict)
    """How many writes of the supervisor failed, by file."""
    processes: list[ProcessState] = field(default_factory=list)

    @property
    def credentials(self) -> ClusterCredentials:
        """The credentials with which the cluster's members authenticate each other."""
        return ClusterCredentials(
            self.cluster_secret, self.rpc_tls_certificate, self.rpc_tls_key, self.rpc_tls_ca
        )


SUPERVISOR_LOG = "supervisor.log"


class ClusterFolder:
    """The folder of one cluster below ``home``. It belongs to the supervisor that holds the lock in
    it."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.path = home / "clusters" / name
        self.logs = self.path / "logs"
        self.control_socket = self.path / "control.sock"
        self._state = self.path / "state.json"
        self._lock = self.path / "lock"
        self._lock_file: int | None = None

    def acquire(self) -> None:
        """Acquire the lock. Raises Invalid when another supervisor has it."""
        self.create()
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_to_lock(file, fcntl.LOCK_EX, LOCK_ATTEMPTS):
            os.close(file)
            raise self.already_running_error()
        self._lock_file = file
        self._state.unlink(missing_ok=True)
        self.control_socket.unlink(missing_ok=True)
        for earlier_part in self.logs.glob("*.log.1"):
            earlier_part.unlink(missing_ok=True)
        for log in self.logs.glob("*.log"):
            if log.name != SUPERVISOR_LOG:
                log.replace(log.with_suffix(".log.old"))

    def create(self) -> None:
        """Create the folder for this user alone. Raises Unavailable if that is not possible."""
        with self._explain_refusal():
            self.logs.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)

    @contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """Turn the system's refusal to create or read a file of the folder into Unavailable."""
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"{error.filename}: {error.strerror}; set BATON_HOME to a folder in which this "
                "user may create files"
            ) from error

    def already_running_error(self) -> Invalid:
        name = self.path.name
        return Invalid(
            f"a cluster named {name!r} is already running: run `baton down --name {name}`, or "
            "choose another --name"
        )

    def release(self) -> None:
        with suppress(OSError):  # of a disk that can't be written any more
            self.control_socket.unlink(missing_ok=True)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def is_locked(self) -> bool:
        """Whether a supervisor is running."""
        with self._explain_refusal():
            try:
                file = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        try:
            return not _try_to_lock(file, fcntl.LOCK_SH, attempts=1)
        finally:
            os.close(file)

    def write_state(self, state: ClusterState) -> None:
        """Write the state atomically: a reader sees either the old state or the new one."""
        new = self._state.with_suffix(".new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as text:
            json.dump(asdict(state), text)
        new.replace(self._state)

    def read_state(self) -> ClusterState | None:
        """Return the last state; None if there is none, or if it was written by another version of
        Baton."""
        try:
            raw = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        try:
            raw["processes"] = [ProcessState(**entry) for entry in raw["processes"]]
            return ClusterState(**raw)
        except (TypeError, KeyError):
            return None  # another version wrote it

    def read_running(self) -> ClusterState:
        """Return the state of the running cluster. Raises NotFound if it is not running."""
        state = self.read_state() if self.is_locked() else None
        if state is None:
            raise NotFound(
                f"no cluster named {self.path.name!r} is running here: start it with `baton up`"
            )
        return state

    def signal_supervisor(self, number: signal.Signals) -> None:
        try:
            os.kill(self.read_running().supervisor_pid, number)
        except ProcessLookupError as error:
            raise NotFound(f"the cluster named {self.path.name!r} has just stopped") from error


def _try_to_lock(file: int, kind: int, attempts: int) -> bool:
    """Try to lock a file until it is closed. Return whether that succeeded."""
    for _ in range(attempts):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            select.select([], [], [], LOCK_RETRY_SECONDS)
        else:
            return True
    return False
