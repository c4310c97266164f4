"""Tests that the mapping of a peer's KV pool is removed once the peer has left the cluster, and
that no other mapping is."""

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
    """A membership view that is always fresh while ``answers`` is true."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.members: list[Member] = []
        self.answers = True
        self._fresh_at = 0.0

    @property
    def last_answer_seconds(self) -> float:
        if self.answers:
            self._fresh_at = self._clock.monotonic()
        return self._fresh_at


class Peers:
    """A reader that has mapped the KV pools of two sources."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.members = Members(self.clock)
        self.memories = {name: HostMemory(name, SIZE) for name in ("reader", "stays", "leaves")}
        self.sides = {name: self._transport(name) for name in self.memories}
        self.reader = self.sides["reader"]
        self.sweeper = StalePeerSweeper([self.reader], self.members, self.clock)
        for name in ("stays", "leaves"):
            self.reader.connect(self.sides[name].export())
        self.members.members = [member("reader"), member("stays")]

    def _transport(self, name: str) -> ShmTransport:
        transport = ShmTransport(name, 1, self.clock, "here")
        region: Region = self.memories[name].region
        transport.register(region)
        return transport

    def pass_grace(self) -> None:
        """Sweep twice, ``GRACE_SECONDS`` apart."""
        self.sweeper.sweep()
        self.clock.advance(GRACE_SECONDS)
        self.sweeper.sweep()

    @property
    def connected(self) -> set[str]:
        return {peer.endpoint.owner for peer in self.reader.idle_peers()}

    @property
    def num_maps(self) -> int:
        """The number of mappings of the test's KV pools in this process."""
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
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def test_pool_of_a_departed_worker_is_unmapped_after_the_grace_period(peers: Peers) -> None:
    before = peers.num_maps
    peers.sweeper.sweep()
    peers.clock.advance(GRACE_SECONDS - 1)
    peers.sweeper.sweep()
    assert peers.connected == {"stays", "leaves"}
    peers.clock.advance(1)
    peers.sweeper.sweep()
    assert peers.connected == {"stays"}
    assert peers.num_maps == before - 1


def test_worker_that_returns_in_time_stays_connected(peers: Peers) -> None:
    peers.sweeper.sweep()
    peers.members.members.append(member("leaves"))
    peers.pass_grace()
    peers.members.members.pop()
    peers.sweeper.sweep()
    assert peers.connected == {"stays", "leaves"}


def test_restarted_worker_is_another_peer(peers: Peers) -> None:
    peers.members.members.append(member("leaves", generation=2))
    peers.pass_grace()
    assert peers.connected == {"stays"}


def test_stale_registry_view_disconnects_nothing(peers: Peers) -> None:
    peers.sweeper.sweep()
    peers.members.answers = False
    peers.clock.advance(2 * GRACE_SECONDS)
    peers.sweeper.sweep()
    assert peers.connected == {"stays", "leaves"}
    peers.members.answers = True
    peers.sweeper.sweep()
    assert peers.connected == {"stays", "leaves"}, "time without an answer must not count"


def test_peer_is_kept_until_its_running_transfer_has_ended(peers: Peers) -> None:
    read = peers.reader.copy

    def copy_meanwhile(endpoint: object, span: TransferRange) -> None:
        peers.pass_grace()
        assert peers.reader.connect(peer.endpoint) is peer
        read(endpoint, span)  # type: ignore[arg-type]

    peers.reader.copy = copy_meanwhile  # type: ignore[method-assign, assignment]
    peer = peers.reader.connect(peers.sides["leaves"].export())
    transfer = peers.reader.prepare(peer, [TransferRange(0, 0, 4096)], 1.0)
    peers.reader.post(transfer)
    assert transfer.error == ""
    peers.pass_grace()
    assert peers.connected == {"stays"}
