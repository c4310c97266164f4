"""Tests a cluster in the foreground under streams: its output and its files can't be written, and
then all of its processes are told to stop at once."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from baton.network.free_port import free_port
from testkit.local_cluster import BATON, LocalCluster
from testkit.machine import pause

pytestmark = pytest.mark.timeout(300)
TOKENS = 800
BEGUN_TOKENS = 20
"""The number of tokens after which a stream counts as under way."""

PROMPTS = [list(range(first, first + 80)) for first in (10, 20, 30)]
FIELDS = {"temperature": 0, "ignore_eos": True}


@dataclass
class ForegroundCluster:
    """A cluster whose supervisor is a child of this process."""

    cluster: LocalCluster
    supervisor: "subprocess.Popen[str]"

    @property
    def output(self) -> IO[str]:
        assert self.supervisor.stdout is not None
        return self.supervisor.stdout

    @property
    def folder(self) -> Path:
        return self.cluster.home / "clusters" / "default"

    def expected(self) -> list[list[int]]:
        return [self.cluster.complete(prompt, TOKENS, **FIELDS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def foreground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForegroundCluster]:
    """A cluster that has no terminal: its output goes to a pipe."""
    port, home = free_port(), tmp_path_factory.mktemp("home")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    portable = os.environ.get("BATON_PORTABLE")
    kept |= {"BATON_PORTABLE": portable} if portable else {}
    environment = {**kept, "BATON_HOME": str(home), "BATON_OPS_PORT": "0"}
    command = [*BATON, "up", "--prefill", "1", "--decode", "2", "--port", str(port)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as supervisor:
        cluster = LocalCluster(f"http://127.0.0.1:{port}", home, environment)
        running = ForegroundCluster(cluster, supervisor)
        try:
            lines = iter(running.output)
            assert any("is ready" in line for line in lines), "baton up has failed"
            yield running
        finally:
            cluster.baton("down", check=False)


class Streams:
    """Streams an answer to each of ``PROMPTS``, each in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url + "/v1/completions"
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.ends = [""] * len(PROMPTS)
        self._begun = [threading.Event() for _ in PROMPTS]
        self._threads = [
            threading.Thread(target=self._read, args=(index,)) for index in range(len(PROMPTS))
        ]

    def begin(self) -> None:
        """Return when all streams are under way."""
        for thread in self._threads:
            thread.start()
        for begun in self._begun:
            assert begun.wait(120)
        assert not any(self.ends), "a stream has ended too early for this test"

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self, index: int) -> None:
        body: dict[str, Any] = {
            "prompt": PROMPTS[index], "max_tokens": TOKENS, "stream": True,
            "return_token_ids": True, **FIELDS,
        }  # fmt: skip
        try:
            with httpx.Client(timeout=120) as client:
                with client.stream("POST", self._url, json=body) as answer:
                    for line in filter(None, answer.iter_lines()):
                        self._add(index, line)
        except httpx.HTTPError as error:
            self.ends[index] = repr(error)
        finally:
            self._begun[index].set()

    def _add(self, index: int, line: str) -> None:
        if not line.startswith("data: {"):
            self.ends[index] = line
            return
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", ()):
            self.tokens[index] += choice.get("token_ids") or []
        if "error" in event:
            self.ends[index] = line
        if len(self.tokens[index]) >= BEGUN_TOKENS:
            self._begun[index].set()


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """In the ``with`` block, the cluster's state can't be written, and neither can the logs of
    processes that start."""
    links = [folder / "state.new", *(folder / "logs" / f"decode-{n}.log" for n in (0, 1))]
    for link in links:
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/full")
    yield
    links[0].unlink()


def test_a_cluster_survives_lost_output_and_a_full_disk(foreground: ForegroundCluster) -> None:
    """The reader of the supervisor's output goes away, the disk is full, and the decode workers are
    killed under streams: they are restarted, and answers are the same as before."""
    expected = foreground.expected()
    before = {p["id"]: p["pid"] for p in foreground.cluster.processes("decode")}
    streams = Streams(foreground.cluster.url)
    foreground.output.close()
    with full_disk(foreground.folder):
        streams.begin()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        streams.join()
        assert streams.tokens == expected
        assert streams.ends == ["data: [DONE]"] * len(PROMPTS)
        children = psutil.Process(foreground.supervisor.pid).children()
        pids = {child.pid for child in children}
        assert not pids & set(before.values())
    while "state.json" not in foreground.cluster.status()["lost_writes"]:
        pause(0.1)  # it is still the one that was written before
    foreground.cluster.wait_until_ready()
    lost = foreground.cluster.status()["lost_writes"]
    assert lost["state.json"] > 0 and lost["stdout"] > 0
    for worker in foreground.cluster.processes("decode"):
        assert worker["restarts"] == 1
        metrics = httpx.get(f"http://{worker['ops']}/metrics").text
        assert 'baton_lost_writes_total{file="stderr"} 0.0' not in metrics
        assert 'baton_lost_writes_total{file="stderr"}' in metrics
    assert foreground.expected() == expected


def test_streams_end_whole_when_all_processes_are_told_to_stop(
    foreground: ForegroundCluster,
) -> None:
    """As systemd does it: SIGTERM to the supervisor, then to all other processes of its control
    group, then SIGCONT. Its output has no reader any more, either. The routers stop first, then the
    workers, then what both need."""
    expected = foreground.expected()
    streams = Streams(foreground.cluster.url)
    supervisor = psutil.Process(foreground.supervisor.pid)
    streams.begin()
    group = [supervisor, *supervisor.children(recursive=True)]
    for number in (signal.SIGTERM, signal.SIGCONT):
        for process in group:
            process.send_signal(number)
    streams.join()
    assert streams.tokens == expected
    assert streams.ends == ["data: [DONE]"] * len(PROMPTS)
    assert foreground.supervisor.wait() == 0
    assert [process.pid for process in group if process.is_running()] == []
    stopped = {path.stem: stopped_at(path) for path in (foreground.folder / "logs").glob("*.log")}
    order = ["router", "prefill-0", "conductor", "kvstore"]
    assert sorted(order, key=lambda name: stopped[name]) == order


def stopped_at(log: Path) -> str:
    """Return when a process reported that it has stopped."""
    if not log.is_file():  # /dev/full
        return ""
    lines = [line for line in log.read_text().splitlines() if "state=stopped" in line]
    return lines[-1].split()[0] if lines else ""
