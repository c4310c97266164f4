"""Stock servers that are killed, frozen and started again, and the cluster that attaches them."""

import asyncio
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.core.member import Member
from baton.core.states import WorkerState
from baton.network.free_port import free_port
from command_line.status import fetch_members
from orchestrator.cluster_state import ClusterFolder
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, pause
from tests.vllm.e2e.stock_server import TRANSFER, Server, start_server

READY_SECONDS = 240.0
POLL_SECONDS = 0.2
ORPHAN_SECONDS = 10.0
"""How long the processes of a killed server may take to end by themselves."""

HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
TRANSFERS = "vllm:nixl_bytes_transferred_count"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
FAILED = "vllm:nixl_num_failed_transfers_total"


class Violation(Exception):
    """Something that must not happen."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> float:
    """Return after how many seconds the condition was true. Raises Violation after ``seconds``."""
    began = SYSTEM_CLOCK()
    while not condition():
        if SYSTEM_CLOCK() >= began + seconds:
            raise Violation(f"not within {seconds:g} s: {what}")
        pause(POLL_SECONDS)
    return SYSTEM_CLOCK() - began


@dataclass
class ChaosServer:
    """A server of one worker, which can be started again at its port."""

    name: str
    role: str
    model: Path
    folder: Path
    version: str
    arguments: tuple[str, ...]
    port: int = field(default_factory=free_port)
    side_channel_port: int = field(default_factory=free_port)
    num_starts: int = 0
    num_orphans: int = 0
    """How many of its processes outlived a killed one for longer than ORPHAN_SECONDS."""

    _server: Server | None = None
    _tree: list[psutil.Process] = field(default_factory=list)

    @property
    def server(self) -> Server:
        assert self._server is not None, f"{self.name} has not been started"
        return self._server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def exchanges_kv(self) -> bool:
        return self.role != "mixed"

    def start(self) -> None:
        self.num_starts += 1
        log = self.folder / f"{self.name}.{self.num_starts}.log"
        arguments = (*self.arguments, TRANSFER) if self.exchanges_kv else self.arguments
        self._server = start_server(
            self.model, log, self.version, self.port, arguments, self.side_channel_port
        )

    def wait(self) -> None:
        """Wait until the server responds."""
        wait_until(self._responds, f"{self.name} responds")
        self._tree = self.server.tree

    def restart(self) -> None:
        self.stop()
        self.start()
        self.wait()

    @property
    def has_ended(self) -> bool:
        return self.server.process.poll() is not None

    def _responds(self) -> bool:
        if self.has_ended:
            raise Violation(f"{self.name} has ended; see its log in {self.folder}")
        try:
            self.server.ask("/v1/models")
        except OSError:
            return False
        return True

    def kill(self, victim: psutil.Process) -> None:
        """Kill one of the server's processes, and wait until all have ended."""
        victim.kill()
        with suppress(Violation):
            wait_until(lambda: not self._running, "all have ended", ORPHAN_SECONDS)
        self.num_orphans += len(self._running)
        self.stop()

    def stop(self) -> None:
        for process in self._running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._server is not None:
            self._server.kill()
        wait_until(lambda: not self._running, f"{self.name} has ended")

    @property
    def _running(self) -> list[psutil.Process]:
        """Those of the server's processes that have not ended; not a zombie, which nobody reaps."""
        if self._server is not None:
            self._server.process.poll()
        return [each for each in self._tree if _is_running(each)]

    def metric(self, name: str) -> float:
        """Return a metric of the server, or 0 while it does not respond."""
        try:
            return self.server.metric(name)
        except OSError:
            return 0.0

    def held(self) -> dict[str, float]:
        """Return what the server holds for requests: their numbers, and the share of its KV."""
        return {name.removeprefix("vllm:"): self.server.metric(name) for name in HELD}


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Site:
    """A cluster and its servers."""

    cluster: LocalCluster
    servers: list[ChaosServer]

    def of_role(self, role: str) -> list[ChaosServer]:
        return [each for each in self.servers if each.role == role]

    def members(self) -> dict[str, Member]:
        state = ClusterFolder(self.cluster.home, "default").read_running()
        return {str(name): each for name, each in asyncio.run(fetch_members(state)).items()}

    def worker_pid(self, server: ChaosServer) -> int:
        """Return the process of the server's worker, or 0 if there is none now."""
        for entry in self.cluster.processes(server.role):
            with suppress(psutil.Error):
                attach = psutil.Process(entry["pid"]).environ().get("BATON_ATTACH", "")
                if attach.endswith(server.url):
                    return int(entry["pid"])
        return 0

    def well(self) -> list[ChaosServer]:
        """Return the servers whose workers accept requests."""
        ready = {each.pid for each in self.members().values() if each.state is WorkerState.READY}
        return [each for each in self.servers if self.worker_pid(each) in ready]

    def wait_until_well(self) -> float:
        return wait_until(
            lambda: len(self.well()) == len(self.servers), "all workers accept requests"
        )

    def num_transfers(self) -> float:
        return sum(each.metric(TRANSFERS) for each in self.of_role("decode"))

    def wait_until_nothing_is_held(self, seconds: float) -> dict[str, dict[str, float]]:
        """Return what each server still holds after this time, if it holds anything."""
        left = {each.name: each for each in self.servers}
        last: dict[str, dict[str, float]] = {}

        def is_over() -> bool:
            for name, server in list(left.items()):
                last[name] = server.held()
                if not any(last[name].values()):
                    del left[name], last[name]
            return not left

        with suppress(Violation):
            wait_until(is_over, "nothing is held", seconds)
        return last

    def kill_worker(self, server: ChaosServer) -> None:
        """Kill the process of Baton's worker; the cluster starts it again."""
        pid = self.worker_pid(server)
        if pid:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)

    def log_count(self, event: str) -> int:
        """Return how often the workers have logged an event."""
        logs = ClusterFolder(self.cluster.home, "default").logs.glob("*.log*")
        return sum(len(re.findall(rf"\b{event}\b", log.read_text())) for log in logs)


@contextmanager
def running(servers: Sequence[ChaosServer]) -> Iterator[None]:
    """Start servers, and kill them at the end of the block."""
    with ExitStack() as stack:
        for each in servers:
            stack.callback(each.stop)
            each.start()
        for each in servers:
            each.wait()
        yield


@contextmanager
def attached(
    model: Path, servers: Sequence[ChaosServer], folder: Path, dtype: str
) -> Iterator[Site]:
    """Start a cluster in front of servers. Its logs are copied to ``folder`` at the end."""
    settings: dict[str, object] = {
        "attach": ",".join(f"{each.role}={each.url}" for each in servers),
        "admission": "off",
        "slo_itl_seconds": 0.001,  # no prompt is so short that the decode server computes it
        "dtype": dtype,
    }
    roles = [each.role for each in servers]
    prefill, decode, mixed = (roles.count(each) for each in ("prefill", "decode", "mixed"))
    with local_cluster(
        model, prefill, decode, settings, timeout_seconds=400.0, mixed=mixed
    ) as cluster:
        site = Site(cluster, list(servers))
        try:
            site.wait_until_well()
            yield site
        finally:
            logs = ClusterFolder(cluster.home, "default").logs
            shutil.copytree(logs, folder, dirs_exist_ok=True)
