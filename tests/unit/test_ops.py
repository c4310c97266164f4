"""The ops server: probes, metrics, and a drain, from threads of its own."""

import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton.clock import ManualClock
from baton.errors import Unavailable
from baton.network.browser_guard import BrowserGuard
from baton.serve.ops_server import MAX_REQUESTS, OpsServer, is_loopback
from baton.serve.process_health import ProcessHealth


class House:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.vitals = ProcessHealth(self.clock)
        self.vitals.begin()
        self.ops = OpsServer(self.vitals, 20.0, BrowserGuard(hosts=()))
        self.address = self.ops.open("127.0.0.1", 0)
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection(self.address, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip()
        finally:
            connection.close()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.ops.close()


def test_before_anything_is_loaded(house: House) -> None:
    assert house.ask("/startupz") == (503, "starting")
    assert house.ask("/readyz") == (503, "starting")
    assert house.ask("/livez") == (200, "starting")
    assert 'baton_program_state{state="starting"} 1.0' in house.ask("/metrics")[1]


def test_a_life(house: House) -> None:
    house.vitals.load("weights", 5 * 10**8, 10**9)
    assert house.ask("/startupz") == (503, "starting: weights: 0.50 of 1.00 GB")
    assert "baton_loaded_bytes 5e+08" in house.ask("/metrics")[1]
    house.vitals.move("serving")
    assert house.ask("/startupz?verbose") == (200, "serving")
    assert house.ask("/readyz") == (200, "serving")
    house.vitals.move("draining")
    assert house.ask("/startupz") == (200, "draining")
    assert house.ask("/readyz") == (503, "draining")
    assert house.ask("/livez") == (200, "draining")


def test_an_event_loop_that_stands_still(house: House) -> None:
    house.vitals.move("serving")
    house.clock.advance(30.0)
    assert house.ask("/livez") == (503, "the event loop has stood still for 30 s")
    assert house.ask("/readyz") == (200, "serving")
    house.vitals.beat()
    assert house.ask("/livez") == (200, "serving")


def test_a_drain_is_asked_for_once(house: House) -> None:
    house.ops.watch(CollectorRegistry(), house.drain)
    house.vitals.move("serving")
    assert house.ask("/drain", "POST") == (202, "serving")
    house.vitals.move("draining")
    assert house.ask("/drain", "POST") == (202, "draining")
    house.vitals.drained = True
    assert house.ask("/drain", "POST") == (200, "drained")
    assert house.drains == 1


def test_a_drain_before_the_program_is_there(house: House) -> None:
    assert house.ask("/drain", "POST")[0] == 202
    house.ops.watch(CollectorRegistry(), house.drain)
    assert house.drains == 1


@pytest.mark.parametrize(
    ("peer", "here", "status"),
    [
        ("127.0.0.1", "127.0.0.1", 202),
        ("::1", "::1", 202),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", 202),
        ("10.1.2.3", "10.1.2.3", 202),  # it listens at its own address only
        ("10.1.2.4", "10.1.2.3", 403),
        ("fe80::1%eth0", "fe80::2", 403),
    ],
)
def test_only_this_host_may_drain(house: House, peer: str, here: str, status: int) -> None:
    house.ops.watch(CollectorRegistry(), house.drain)
    assert house.ops.post("/drain", peer, here)[0] == status
    assert house.drains == (status == 202)


def test_metrics_of_the_program(house: House) -> None:
    registry = CollectorRegistry()
    house.ops.watch(registry, house.drain)
    Counter("baton_jumps", "Counted after it was watched.", registry=registry).inc(3)
    told = house.ask("/metrics")[1]
    assert "baton_jumps_total 3.0" in told and "process_resident_memory_bytes" in told


def test_a_collector_with_a_bug_takes_nothing_else_along(house: House) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise ValueError("a bug")

    house.ops.watch(Broken(), house.drain)
    with pytest.raises(OSError):
        house.ask("/metrics")
    assert house.ask("/livez")[0] == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/livez"), ("GET", "/drain")])
def test_what_there_is_not(house: House, method: str, path: str) -> None:
    status, told = house.ask(path, method)
    assert status == 404 and told.startswith(f"there is no {path}; there are GET /startupz")


def test_who_says_nothing_is_bounded(house: House) -> None:
    """Beyond the bound a connection is hung up on; once the others have left, it answers."""
    host, _, port = house.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), 10) for _ in range(MAX_REQUESTS)]
    with pytest.raises(OSError):
        house.ask("/livez")
    for each in silent:
        each.close()
    while True:  # until the threads have noticed
        try:
            assert house.ask("/livez")[0] == 200
            break
        except OSError:
            pass


def test_a_port_that_is_taken(house: House) -> None:
    port = int(house.address.rpartition(":")[2])
    with pytest.raises(Unavailable, match=f"ops_port: can't listen on 127.0.0.1:{port}: "):
        OpsServer(house.vitals, 20.0).open("127.0.0.1", port)


def test_loopback() -> None:
    assert is_loopback("127.8.8.8") and is_loopback("::1")
    assert not is_loopback("192.168.0.1") and not is_loopback("::ffff:10.0.0.1")


def test_no_web_pages(house: House) -> None:
    """A page can send a request to loopback, and can have its own name point there."""
    house.ops.watch(CollectorRegistry(), house.drain)
    for page in ({"Origin": "http://evil.example"}, {"Host": "evil.example:9000"}):
        assert house.ask("/drain", "POST", **page)[0] == 403
        assert house.ask("/metrics", **page)[0] == 403
    assert house.ask("/drain", "POST", Origin="http://localhost:3000")[0] == 403
    assert house.ask("/metrics", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert house.drains == 0
    assert house.ask("/metrics", Host="localhost:9000")[0] == 200
