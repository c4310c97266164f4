"""Tests the ops server, which serves probes and metrics on its own threads."""

import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton.clock import ManualClock
from baton.core.pending_settings import PendingSettings
from baton.errors import Unavailable
from baton.network.browser_guard import BrowserGuard
from baton.serve.ops_server import MAX_REQUESTS, OpsServer
from baton.serve.process_health import ProcessHealth
from baton.serve.status_pipe import STATUS


class OpsHarness:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = ProcessHealth(self.clock)
        self.health.start()
        self.ops = OpsServer(self.health, 20.0, BrowserGuard(hosts=()))
        self.address = self.ops.open("127.0.0.1", 0)

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection(self.address, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        finally:
            connection.close()


@pytest.fixture
def harness() -> Iterator[OpsHarness]:
    harness = OpsHarness()
    yield harness
    harness.ops.close()


def test_starting_program_is_alive_but_not_ready(harness: OpsHarness) -> None:
    assert harness.request("/startupz") == (503, "starting")
    assert harness.request("/readyz") == (503, "starting")
    assert harness.request("/livez") == (200, "starting")
    assert 'baton_program_state{state="starting"} 1.0' in harness.request("/metrics")[1]


def test_probes_follow_the_program_state(harness: OpsHarness) -> None:
    harness.health.record_load_progress("weights", 5 * 10**8, 10**9)
    assert harness.request("/startupz") == (503, "starting: weights: 0.50 of 1.00 GB")
    assert "baton_loaded_bytes 5e+08" in harness.request("/metrics")[1]
    harness.health.set_state("serving")
    assert harness.request("/startupz?verbose") == (200, "serving")
    assert harness.request("/readyz") == (200, "serving")
    harness.health.set_state("draining")
    assert harness.request("/startupz") == (200, "draining")
    assert harness.request("/readyz") == (503, "draining")
    assert harness.request("/livez") == (200, "draining")


def test_pending_settings_are_metrics_and_in_the_members_entry(harness: OpsHarness) -> None:
    def pending() -> list[str]:
        lines = harness.request("/metrics")[1].splitlines()
        return [line.split("{")[1] for line in lines if line.startswith("baton_settings_pending")]

    assert pending() == ['reason="restart"} 0.0', 'reason="rejected"} 0.0']
    STATUS.health, before = harness.health, STATUS.health
    try:
        STATUS.send_settings({"restart_needed": ["model", "port"], "rejected": "port is 'x'"})
    finally:
        STATUS.health = before
    assert pending() == ['reason="restart"} 2.0', 'reason="rejected"} 1.0']
    expected = PendingSettings(("model", "port"), "port is 'x'")
    assert harness.health.pending_settings == expected


def test_livez_fails_when_the_event_loop_hangs(harness: OpsHarness) -> None:
    harness.health.set_state("serving")
    harness.clock.advance(30.0)
    assert harness.request("/livez") == (503, "the event loop has been blocked for 30 s")
    assert harness.request("/readyz") == (200, "serving")
    harness.health.record_heartbeat()
    assert harness.request("/livez") == (200, "serving")


def test_metrics_include_the_programs_registry(harness: OpsHarness) -> None:
    registry = CollectorRegistry()
    harness.ops.attach_program(registry)
    Counter("baton_jumps", "Counted after it was watched.", registry=registry).inc(3)
    body = harness.request("/metrics")[1]
    assert "baton_jumps_total 3.0" in body and "process_resident_memory_bytes" in body


def test_failing_collector_does_not_affect_probes(harness: OpsHarness) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise ValueError("a bug in the collector")

    harness.ops.attach_program(Broken())
    with pytest.raises(OSError):
        harness.request("/metrics")
    assert harness.request("/livez")[0] == 200


def test_unknown_path_lists_the_existing_ones(harness: OpsHarness) -> None:
    paths = "/startupz, /readyz, /livez, /metrics"
    assert harness.request("/") == (404, f"unknown path /; the paths are {paths}")
    assert harness.request("/livez", "POST")[0] == 501


def test_silent_connections_are_bounded(harness: OpsHarness) -> None:
    """While ``MAX_REQUESTS`` connections are open and send nothing, any further connection is
    closed. Once the silent ones are closed, the server answers again."""
    host, _, port = harness.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), 10) for _ in range(MAX_REQUESTS)]
    with pytest.raises(OSError):
        harness.request("/livez")
    for each in silent:
        each.close()
    while True:  # until the threads have noticed the closed connections
        try:
            assert harness.request("/livez")[0] == 200
            break
        except OSError:
            pass


def test_port_in_use_is_reported(harness: OpsHarness) -> None:
    port = int(harness.address.rpartition(":")[2])
    with pytest.raises(Unavailable, match=f"ops_port: can't listen on 127.0.0.1:{port}: "):
        OpsServer(harness.health, 20.0).open("127.0.0.1", port)


def test_requests_from_web_pages_are_rejected(harness: OpsHarness) -> None:
    """A web page can send requests to loopback addresses, and can make its own host name resolve to
    one."""
    for page in ({"Origin": "http://evil.example"}, {"Host": "evil.example:9000"}):
        assert harness.request("/metrics", **page)[0] == 403
    assert harness.request("/metrics", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert harness.request("/metrics", Host="localhost:9000")[0] == 200
