"""Tests that new connections are started in turn by the networks that they come from, and that
those whose client has left are dropped."""

import asyncio
import errno
import itertools
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from router.http import acceptor
from router.http.acceptor import Acceptor
from router.http.idle_connections import IdleConnection, choose_to_close
from router.http.server import open_listener
from router.limits import STARTS_PER_ITERATION
from testkit.leaving_connections import DEPARTURES, Departure, open_connection
from tests.facilities import FACILITIES, facilities
from tests.router_harness import eventually

CROWD, NEIGHBOUR = "127.0.0.2", "127.0.0.1"


class Started:
    """An acceptor that closes connections instead of serving them, and the ports of their
    clients in the order in which they were started."""

    def __init__(self, max_waiting: int = 1000) -> None:
        self.ports: list[int] = []
        self.overflows = 0
        self.listener = open_listener("127.0.0.1", 0)
        self.acceptor = Acceptor(self._start, lambda: max_waiting, self._on_overflow)

    def _start(self, connection: socket.socket, network: str) -> None:
        self.ports.append(connection.getpeername()[1])
        connection.close()

    def _on_overflow(self) -> None:
        self.overflows += 1

    def connect(self, source: str, departure: Departure | None = None) -> socket.socket:
        address = self.listener.getsockname()[:2]
        return open_connection(address, departure or Departure(), source)

    def clients(self, source: str, count: int) -> list[socket.socket]:
        return [self.connect(source) for _ in range(count)]


@contextmanager
def running(max_waiting: int = 1000) -> Iterator[Started]:
    started = Started(max_waiting)
    try:
        yield started
    finally:
        started.acceptor.close()
        started.listener.close()


def ports_of(clients: list[socket.socket]) -> list[int]:
    return [client.getsockname()[1] for client in clients]


def test_idle_connections_of_the_largest_network_are_closed_first() -> None:
    deadlines = {"a": [5, 1, 4, 2, 3], "b": [1, 9], "c": [0]}
    idle = [
        IdleConnection(network, deadline, lambda: None)
        for network, several in deadlines.items()
        for deadline in several
    ]
    chosen = [(each.network, each.deadline) for each in choose_to_close(idle, 6)]
    assert chosen == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4), ("c", 0)]
    assert choose_to_close([], 6) == []


async def test_neighbour_is_started_after_one_connection_of_a_crowd() -> None:
    with running() as started:
        crowd, [neighbour] = started.clients(CROWD, 50), started.clients(NEIGHBOUR, 1)
        started.acceptor.listen(started.listener)
        await eventually(lambda: len(started.ports) == 51)
        ports = ports_of(crowd)
        assert started.ports == [ports[0], *ports_of([neighbour]), *ports[1:]]
        for client in (*crowd, neighbour):
            client.close()


async def test_few_connections_are_started_in_one_iteration() -> None:
    with running() as started:
        crowd = started.clients(CROWD, 50)
        started.acceptor.listen(started.listener)
        counts = [0]
        while counts[-1] < len(crowd):
            await asyncio.sleep(0)
            counts.append(len(started.ports))
        steps = [later - earlier for earlier, later in itertools.pairwise(counts)]
        assert max(steps) == STARTS_PER_ITERATION
        for client in crowd:
            client.close()


@pytest.mark.parametrize("is_portable", [each == "portable" for each in FACILITIES])
@pytest.mark.parametrize("how", list(DEPARTURES))
async def test_clients_that_have_left_are_dropped(how: str, is_portable: bool) -> None:
    """Without Linux, those that have sent something are not known to have left."""
    departure = DEPARTURES[how]
    with facilities(is_portable), running() as started:
        first = started.connect(NEIGHBOUR)
        crowd = [started.connect(CROWD, departure) for _ in range(100)]
        ports = ports_of(crowd)
        for client in crowd:
            if not departure.stays_seconds:
                client.close()
        last = started.connect(NEIGHBOUR)
        started.acceptor.listen(started.listener)
        [first_port, last_port] = ports_of([first, last])
        await eventually(lambda: last_port in started.ports)
        is_noticed = not (departure.stays_seconds or (is_portable and departure.data))
        await eventually(lambda: len(started.ports) == 2 + 100 * (not is_noticed))
        assert set(started.ports) == {first_port, last_port, *(ports if not is_noticed else ())}
        for client in (first, last, *crowd):
            client.close()


async def test_overflow_costs_the_largest_network_its_oldest_connections() -> None:
    with running(max_waiting=STARTS_PER_ITERATION) as started:
        crowd, [neighbour] = started.clients(CROWD, 20), started.clients(NEIGHBOUR, 1)
        started.acceptor.listen(started.listener)
        await eventually(lambda: len(started.ports) == STARTS_PER_ITERATION)
        ports = ports_of(crowd)[13:]
        assert sorted(started.ports) == sorted([*ports, *ports_of([neighbour])])
        assert started.overflows == 13
        with closing(crowd[0]) as oldest:
            oldest.setblocking(True)
            assert oldest.recv(1) == b""
        for client in (*crowd, neighbour):
            client.close()


async def test_listener_pauses_when_the_system_has_no_file_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = [OSError(errno.EMFILE, "too many open files")]
    accept = acceptor._accept

    def refuse_once(listener: socket.socket) -> tuple[socket.socket, str] | None:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(acceptor, "_accept", refuse_once)
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    with running() as started, closing(started.connect(NEIGHBOUR)) as client:
        started.acceptor.listen(started.listener)
        await eventually(lambda: started.ports == ports_of([client]))
        assert refusals == []
