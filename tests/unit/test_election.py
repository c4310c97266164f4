"""Of several conductors one leads, and never two."""

from collections.abc import Callable

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.clock import ManualClock
from baton.errors import BatonError, Overloaded, Unauthorized, Unavailable
from baton.pools.leader_election import NO_HOLDER, LeaderElection, LeaseRecord


class Store:
    """``fails``: what the next calls raise; ``loses``: so many writes happen, and nobody is told.
    ``on_its_way`` is called while a write is."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.number = 0
        self.fails: BatonError | None = None
        self.loses = 0
        self.on_its_way: Callable[[], None] = lambda: None

    async def read(self) -> LeaseRecord | None:
        if self.fails is not None:
            raise self.fails
        return self.record

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        if self.fails is not None:
            raise self.fails
        if record.version != (self.record.version if self.record is not None else ""):
            raise Overloaded("changed meanwhile")
        self.on_its_way()
        self.number += 1
        version = str(self.number)
        self.record = LeaseRecord(record.holder, version, record.transitions, version)
        if self.loses:
            self.loses -= 1
            raise Unavailable("no answer")
        return self.record


class House:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.store = Store()
        self.led: list[str] = []
        self.one, self.two = self.elect("one"), self.elect("two")

    def elect(self, name: str, store: Store | None = None) -> LeaderElection:
        return LeaderElection(store or self.store, name, self.clock, lambda: self.led.append(name))

    @property
    def leads(self) -> tuple[bool, bool]:
        return self.one.leads, self.two.leads


@pytest.fixture
def house() -> House:
    return House()


async def test_the_first_one_leads_and_renews(house: House) -> None:
    for _ in range(10):
        await house.one.look()
        await house.two.look()
        assert house.leads == (True, False)
        house.clock.advance(5.0)
    assert house.led == ["one"]
    assert house.store.record is not None
    assert (house.store.record.holder, house.store.record.transitions) == ("one", 0)


async def test_who_can_not_renew_stops_leading_before_another_begins(house: House) -> None:
    await house.one.look()
    await house.two.look()
    house.clock.advance(9.9)
    assert house.one.leads
    house.clock.advance(0.2)
    assert not house.one.leads
    await house.two.look()
    assert not house.two.leads
    house.clock.advance(5.0)  # 15.1 since it was seen
    await house.two.look()
    assert house.leads == (False, True)
    assert house.store.record is not None and house.store.record.transitions == 1


async def test_time_counts_from_when_a_renewal_was_seen(house: House) -> None:
    """It may have been written long before."""
    await house.one.look()
    house.clock.advance(100.0)
    await house.two.look()
    assert not house.two.leads
    house.clock.advance(15.1)
    await house.two.look()
    assert house.two.leads


async def test_who_comes_back_finds_another_one(house: House) -> None:
    await house.one.look()
    await house.two.look()
    house.clock.advance(16.0)
    await house.two.look()
    await house.one.look()
    assert house.leads == (False, True)
    house.clock.advance(5.0)
    await house.two.look()
    await house.one.look()
    assert house.leads == (False, True)


async def test_two_that_want_it_at_once(house: House) -> None:
    """Both have read that there is none; the store takes one of them."""
    stale = await house.store.read()
    await house.two.look()
    house.one._note(stale)
    with pytest.raises(Overloaded):
        await house.one._take(stale)
    await house.one.look()
    assert house.leads == (False, True)


async def test_a_store_that_can_not_be_reached(house: House) -> None:
    await house.one.look()
    house.store.fails = Unavailable("no API server")
    house.clock.advance(5.0)
    with capture_logs() as logs:
        await house.one.look()
        await house.one.look()
    assert [line["failure"] for line in logs] == ["no API server"]
    assert house.one.leads
    house.clock.advance(5.1)
    assert not house.one.leads
    house.store.fails = None
    await house.one.look()
    assert house.one.leads and house.led == ["one", "one"]


async def test_a_write_whose_answer_was_lost_counts_for_nothing(house: House) -> None:
    house.store.loses = 1
    await house.one.look()
    assert not house.one.leads
    await house.two.look()
    assert not house.two.leads
    await house.one.look()  # it finds itself the holder
    assert house.one.leads


async def test_who_leaves_gives_it_back(house: House) -> None:
    await house.one.look()
    await house.two.look()
    await house.one.resign()
    assert house.leads == (False, False)
    assert house.store.record is not None and house.store.record.holder == NO_HOLDER
    await house.two.look()
    assert house.leads == (False, True)
    await house.one.resign()  # it has nothing to give
    assert house.store.record.holder == "two"


async def test_who_leaves_while_nobody_can_be_reached(house: House) -> None:
    await house.one.look()
    house.store.fails = Unauthorized("not allowed to update leases")
    await house.one.resign()
    assert not house.one.leads


@pytest.mark.parametrize("seed", range(20))
async def test_never_two_at_once(seed: int) -> None:
    """Whoever looks when, whatever fails, and however long a write takes."""
    print(f"seed {seed}")
    chance, house = np.random.default_rng(seed), House()
    elections = [house.elect(f"c{n}") for n in range(4)]
    house.store.on_its_way = lambda: house.clock.advance(chance.choice((0.0, 0.1, 9.0)))
    num_led = 0
    for _ in range(2000):
        house.store.fails = Unavailable("down") if chance.random() < 0.2 else None
        house.store.loses = int(chance.random() < 0.1)
        who = elections[chance.integers(len(elections))]
        if chance.random() < 0.02:
            await who.resign()
        else:
            await who.look()
        house.clock.advance(chance.choice((0.01, 0.5, 2.0)))
        leaders = [each for each in elections if each.leads]
        assert len(leaders) <= 1
        num_led += len(leaders)
    assert num_led > 500
