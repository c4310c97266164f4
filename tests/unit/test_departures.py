"""Peers that left the cluster: their pools are let go, and nobody else's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.transport.base import Region, TransferRange
from baton.transport.host_memory import HostMemory
from baton.transport.shm import ShmTransport
from baton.transport.stale_peers import GRACE_SECONDS, StalePeerSweeper

SIZE = 1 << 20


class Members:
    """A registry that answered just now."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.members: list[Member] = []
        self.answers = True
        self._fresh_at = 0.0

    @property
    def fresh_at(self) -> float:
        if self.answers:
            self._fresh_at = self._clock.monotonic()
        return self._fresh_at


class House:
    """A reader that has mapped the pools of two sources."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.members = Members(self.clock)
        self.memories = {name: HostMemory(name, SIZE) for name in ("reader", "stays", "leaves")}
        self.sides = {name: self._transport(name) for name in self.memories}
        self.reader = self.sides["reader"]
        self.departures = StalePeerSweeper([self.reader], self.members, self.clock)
        for name in ("stays", "leaves"):
            self.reader.connect(self.sides[name].export())
        self.members.members = [member("reader"), member("stays")]

    def _transport(self, name: str) -> ShmTransport:
        transport = ShmTransport(name, 1, self.clock, "here")
        region: Region = self.memories[name].region
        transport.register(region)
        return transport

    def pass_grace(self) -> None:
        """Two looks, ``GRACE_SECONDS`` apart."""
        self.departures.sweep()
        self.clock.advance(GRACE_SECONDS)
        self.departures.sweep()

    @property
    def connected(self) -> set[str]:
        return {peer.endpoint.owner for peer in self.reader.idle_peers()}

    @property
    def num_maps(self) -> int:
        """How often this process has mapped a pool."""
        files = [memory.region.file_descriptor for memory in self.memories.values()]
        inodes = {os.fstat(file).st_ino for file in files}
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(int(line.split()[4]) in inodes for line in lines if "memfd:" in line)

    def close(self) -> None:
        for side in self.sides.values():
            side.close()
        for memory in self.memories.values():
            memory.close()


def member(name: str, generation: int = 1) -> Member:
    return Member(WorkerId(name), Role.PREFILL, "a:1", Incarnation(generation), WorkerState.READY)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def test_the_pool_of_a_worker_that_left_is_unmapped(house: House) -> None:
    before = house.num_maps
    house.departures.sweep()
    house.clock.advance(GRACE_SECONDS - 1)
    house.departures.sweep()
    assert house.connected == {"stays", "leaves"}
    house.clock.advance(1)
    house.departures.sweep()
    assert house.connected == {"stays"}
    assert house.num_maps == before - 1


def test_who_comes_back_in_time_stays(house: House) -> None:
    house.departures.sweep()
    house.members.members.append(member("leaves"))
    house.pass_grace()
    house.members.members.pop()
    house.departures.sweep()
    assert house.connected == {"stays", "leaves"}


def test_another_life_of_the_same_worker_is_another_peer(house: House) -> None:
    house.members.members.append(member("leaves", generation=2))
    house.pass_grace()
    assert house.connected == {"stays"}


def test_a_registry_that_does_not_answer_says_nothing(house: House) -> None:
    house.departures.sweep()
    house.members.answers = False
    house.clock.advance(2 * GRACE_SECONDS)
    house.departures.sweep()
    assert house.connected == {"stays", "leaves"}
    house.members.answers = True
    house.departures.sweep()
    assert house.connected == {"stays", "leaves"}, "the time without an answer does not count"


def test_who_is_being_read_stays_until_the_read_has_ended(house: House) -> None:
    read = house.reader.copy

    def copy_meanwhile(endpoint: object, span: TransferRange) -> None:
        house.pass_grace()
        assert house.reader.connect(peer.endpoint) is peer
        read(endpoint, span)  # type: ignore[arg-type]

    house.reader.copy = copy_meanwhile  # type: ignore[method-assign, assignment]
    peer = house.reader.connect(house.sides["leaves"].export())
    transfer = house.reader.prepare(peer, [TransferRange(0, 0, 4096)], 1.0)
    house.reader.post(transfer)
    assert transfer.error == ""
    house.pass_grace()
    assert house.connected == {"stays"}
