"""What is known of a local cluster on disk: its state, its lock, its logs."""

import fcntl
import json
import os
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.errors import Invalid, NotFound


@dataclass(slots=True)
class ProcessState:
    """``state`` is a program's (starting, serving, draining, stopped, failed) or restarting."""

    id: str
    role: str
    pid: int
    state: str
    address: str = ""
    restarts: int = 0
    message: str = ""


@dataclass(slots=True)
class ClusterState:
    """As the supervisor last wrote it. ``failure`` says why it gave up."""

    supervisor_pid: int
    url: str
    redis_url: str
    cluster: str
    ready: bool = False
    failure: str = ""
    processes: list[ProcessState] = field(default_factory=list)


class ClusterFolder:
    """One cluster's folder below ``home``; its owner is whoever holds the lock."""

    def __init__(self, home: Path, name: str) -> None:
        self.path = home / "clusters" / name
        self.logs = self.path / "logs"
        self.socket = self.path / "control.sock"
        self._state = self.path / "state.json"
        self._lock = self.path / "lock"
        self._lock_file: int | None = None

    def take(self) -> None:
        """Becomes the owner. Raises Invalid when somebody is."""
        self.logs.mkdir(parents=True, exist_ok=True)
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise Invalid(
                f"a cluster named {self.path.name!r} is running already: `baton down`, or "
                "another --name"
            ) from error
        self._lock_file = file
        self._state.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)

    def release(self) -> None:
        self.socket.unlink(missing_ok=True)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def is_owned(self) -> bool:
        """Whether a supervisor lives."""
        try:
            file = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def write(self, state: ClusterState) -> None:
        """Atomic: a reader sees the old state or the new one."""
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps(asdict(state)))
        new.replace(self._state)

    def read(self) -> ClusterState | None:
        """None when nothing was written yet."""
        try:
            raw = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        raw["processes"] = [ProcessState(**entry) for entry in raw["processes"]]
        return ClusterState(**raw)

    def running(self) -> ClusterState:
        """Raises NotFound when there is no running cluster of that name."""
        state = self.read() if self.is_owned() else None
        if state is None:
            raise NotFound(f"no cluster named {self.path.name!r} is running here: `baton up`")
        return state

    def signal_owner(self, number: signal.Signals) -> None:
        os.kill(self.running().supervisor_pid, number)
