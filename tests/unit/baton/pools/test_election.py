"""Tests leader election: of several conductors, at most one leads at any time."""

from collections.abc import Callable

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.errors import BatonError, Overloaded, Unauthorized, Unavailable
from baton.pools.leader_election import NO_HOLDER, LeaderElection, LeaseRecord


class Store:
    """A lease store in memory. If ``fails`` is not None, calls raise it. The next
    ``num_lost_answers`` writes take effect, but raise Unavailable as if the store's response was
    lost. ``on_write`` is called during each write."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.number = 0
        self.fails: BatonError | None = None
        self.num_lost_answers = 0
        self.on_write: Callable[[], None] = lambda: None

    async def read(self) -> LeaseRecord | None:
        if self.fails is not None:
            raise self.fails
        return self.record

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        if self.fails is not None:
            raise self.fails
        if record.version != (self.record.version if self.record is not None else ""):
            raise Overloaded("the lease was changed meanwhile")
        self.on_write()
        self.number += 1
        version = str(self.number)
        self.record = LeaseRecord(record.holder, version, record.transitions, version)
        if self.num_lost_answers:
            self.num_lost_answers -= 1
            raise Unavailable("the lease store did not answer")
        return self.record


class Cluster:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.store = Store()
        self.led: list[str] = []
        self.one, self.two = self.elect("one"), self.elect("two")

    def elect(self, name: str, store: Store | None = None) -> LeaderElection:
        return LeaderElection(store or self.store, name, self.clock, lambda: self.led.append(name))

    @property
    def leads(self) -> tuple[bool, bool]:
        return self.one.is_leader, self.two.is_leader


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_first_candidate_leads_and_renews_its_lease(cluster: Cluster) -> None:
    for _ in range(10):
        await cluster.one.check_lease()
        await cluster.two.check_lease()
        assert cluster.leads == (True, False)
        cluster.clock.advance(5.0)
    assert cluster.led == ["one"]
    assert cluster.store.record is not None
    assert (cluster.store.record.holder, cluster.store.record.transitions) == ("one", 0)


async def test_leader_that_can_not_renew_stops_before_another_begins(cluster: Cluster) -> None:
    await cluster.one.check_lease()
    await cluster.two.check_lease()
    cluster.clock.advance(9.9)
    assert cluster.one.is_leader
    cluster.clock.advance(0.2)
    assert not cluster.one.is_leader
    await cluster.two.check_lease()
    assert not cluster.two.is_leader
    cluster.clock.advance(5.0)  # 15.1 s since the lease was seen
    await cluster.two.check_lease()
    assert cluster.leads == (False, True)
    assert cluster.store.record is not None and cluster.store.record.transitions == 1


async def test_lease_expires_by_the_time_since_a_renewal_was_seen(cluster: Cluster) -> None:
    """The renewal may have been written long before it was seen."""
    await cluster.one.check_lease()
    cluster.clock.advance(100.0)
    await cluster.two.check_lease()
    assert not cluster.two.is_leader
    cluster.clock.advance(15.1)
    await cluster.two.check_lease()
    assert cluster.two.is_leader


async def test_returning_leader_finds_another_one(cluster: Cluster) -> None:
    await cluster.one.check_lease()
    await cluster.two.check_lease()
    cluster.clock.advance(16.0)
    await cluster.two.check_lease()
    await cluster.one.check_lease()
    assert cluster.leads == (False, True)
    cluster.clock.advance(5.0)
    await cluster.two.check_lease()
    await cluster.one.check_lease()
    assert cluster.leads == (False, True)


async def test_concurrent_candidates_get_one_leader(cluster: Cluster) -> None:
    """Both candidates have read that there is no leader; the store accepts only one of their
    writes."""
    stale = await cluster.store.read()
    await cluster.two.check_lease()
    cluster.one._observe(stale)
    with pytest.raises(Overloaded):
        await cluster.one._take_or_renew(stale)
    await cluster.one.check_lease()
    assert cluster.leads == (False, True)


async def test_leader_keeps_its_lease_for_a_while_without_the_store(cluster: Cluster) -> None:
    await cluster.one.check_lease()
    cluster.store.fails = Unavailable("the API server can't be reached")
    cluster.clock.advance(5.0)
    with capture_logs() as logs:
        await cluster.one.check_lease()
        await cluster.one.check_lease()
    assert [line["error"] for line in logs] == ["the API server can't be reached"]
    assert cluster.one.is_leader
    cluster.clock.advance(5.1)
    assert not cluster.one.is_leader
    cluster.store.fails = None
    await cluster.one.check_lease()
    assert cluster.one.is_leader and cluster.led == ["one", "one"]


async def test_write_whose_answer_was_lost_does_not_make_a_leader(cluster: Cluster) -> None:
    cluster.store.num_lost_answers = 1
    await cluster.one.check_lease()
    assert not cluster.one.is_leader
    await cluster.two.check_lease()
    assert not cluster.two.is_leader
    await cluster.one.check_lease()  # it reads that it holds the lease
    assert cluster.one.is_leader


async def test_resigning_leader_releases_the_lease(cluster: Cluster) -> None:
    await cluster.one.check_lease()
    await cluster.two.check_lease()
    await cluster.one.resign()
    assert cluster.leads == (False, False)
    assert cluster.store.record is not None and cluster.store.record.holder == NO_HOLDER
    await cluster.two.check_lease()
    assert cluster.leads == (False, True)
    await cluster.one.resign()  # it has nothing to release
    assert cluster.store.record.holder == "two"


async def test_leader_can_resign_without_the_store(cluster: Cluster) -> None:
    await cluster.one.check_lease()
    cluster.store.fails = Unauthorized("not allowed to update leases")
    await cluster.one.resign()
    assert not cluster.one.is_leader


@pytest.mark.parametrize("seed", range(20))
async def test_there_are_never_two_leaders(seed: int) -> None:
    """There is at most one leader, whenever each candidate acts, whatever fails, and however long a
    write takes."""
    print(f"seed {seed}")
    chance, cluster = np.random.default_rng(seed), Cluster()
    elections = [cluster.elect(f"c{n}") for n in range(4)]
    cluster.store.on_write = lambda: cluster.clock.advance(chance.choice((0.0, 0.1, 9.0)))
    num_led = 0
    for _ in range(2000):
        cluster.store.fails = Unavailable("down") if chance.random() < 0.2 else None
        cluster.store.num_lost_answers = int(chance.random() < 0.1)
        who = elections[chance.integers(len(elections))]
        if chance.random() < 0.02:
            await who.resign()
        else:
            await who.check_lease()
        cluster.clock.advance(chance.choice((0.01, 0.5, 2.0)))
        leaders = [each for each in elections if each.is_leader]
        assert len(leaders) <= 1
        num_led += len(leaders)
    assert num_led > 500
