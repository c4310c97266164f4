"""The conductor's memory of traffic, and the live state that decisions are made from."""

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Generation, RequestId, WorkerId
from baton.core.member import Load, Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from conductor import traffic
from conductor.conductor import UNREPORTED_SECONDS, Conductor
from conductor.policy.placement import PlacementConfig
from conductor.policy.snapshot import Query
from conductor.traffic import WINDOW_REQUESTS, Heads, Placed


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def query(name: str, tokens: int = 64, chain: tuple[BlockKey, ...] = ()) -> Query:
    return Query(RequestId(name), tokens, 16, chain)


def member(name: str, role: Role, generation: int = 1, **load: int) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Generation(generation), WorkerState.READY,
        block_tokens=16, load=Load(free_blocks=100, num_blocks=100, **load),
    )  # fmt: skip


class House:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = MemoryRegistry(self.clock)
        self.membership = Membership(self.registry, self.clock)
        self.conductor = Conductor(self.membership, self.clock, PlacementConfig())

    async def announce(self, *members: Member) -> None:
        for one in members:
            await self.registry.announce(one, 1e6)
        await self.membership.refresh()


def test_shares_of_recent_heads() -> None:
    heads = Heads()
    for number in range(15):
        heads.record(keys(0, number + 1))
    assert heads.share(keys(0)[0]) == 0.0  # too few to tell
    heads.record(keys(0, 16))
    assert heads.share(keys(0)[0]) == 1.0
    assert heads.share(keys(3)[0]) == 1 / 16
    for _ in range(WINDOW_REQUESTS):
        heads.record(keys(99))
    assert heads.share(keys(0)[0]) == 0.0
    assert heads.share(keys(99)[0]) == 1.0


def test_placed_blocks_by_worker() -> None:
    placed = Placed()
    placed.record(WorkerId("a"), keys(1, 2, 3))
    placed.record(WorkerId("b"), keys(1, 2))
    assert placed.cached_blocks(WorkerId("a"), keys(1, 2, 3, 4)) == 3
    assert placed.cached_blocks(WorkerId("b"), keys(1, 2, 3)) == 2
    assert placed.cached_blocks(WorkerId("c"), keys(1)) == 0
    placed.forget(WorkerId("a"))
    assert placed.cached_blocks(WorkerId("a"), keys(1, 2, 3)) == 0
    assert placed.cached_blocks(WorkerId("b"), keys(1, 2)) == 2


def test_placed_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_PLACED_KEYS", 3)
    placed = Placed()
    placed.record(WorkerId("a"), keys(1, 2))
    placed.record(WorkerId("a"), keys(3, 4))
    assert placed.cached_blocks(WorkerId("a"), keys(1)) == 0
    assert placed.cached_blocks(WorkerId("a"), keys(2)) == 1


async def test_what_was_sent_counts_until_it_is_reported() -> None:
    house = House()
    await house.announce(member("p", Role.PREFILL), member("d", Role.DECODE))
    for name in ("one", "two"):
        house.conductor.place(query(name, 50))
    view = house.conductor.snapshot().prefills[0]
    assert (view.num_requests, view.queued_tokens) == (2, 100)
    assert house.conductor.snapshot().decodes[0].num_requests == 2
    house.clock.advance(UNREPORTED_SECONDS + 0.1)
    assert house.conductor.snapshot().prefills[0].queued_tokens == 0


async def test_a_burst_is_spread() -> None:
    house = House()
    prefills = [member(f"p{n}", Role.PREFILL) for n in range(4)]
    await house.announce(*prefills, *[member(f"d{n}", Role.DECODE) for n in range(2)])
    chosen = [house.conductor.place(query(str(n))) for n in range(40)]
    counts = {
        pool: sorted([c.id for c in ids].count(name) for name in {c.id for c in ids})
        for pool, ids in {
            "prefill": [c.prefill for c in chosen if c.prefill],
            "decode": [c.decode for c in chosen],
        }.items()
    }
    assert counts == {"prefill": [10, 10, 10, 10], "decode": [20, 20]}


async def test_a_reborn_worker_holds_nothing() -> None:
    house = House()
    await house.announce(member("p", Role.PREFILL), member("d", Role.DECODE))
    house.conductor.place(query("one", 48, keys(1, 2, 3)))
    assert house.conductor.snapshot().cached_blocks(WorkerId("p"), keys(1, 2, 3)) == 3
    await house.announce(member("p", Role.PREFILL, generation=2))
    assert house.conductor.snapshot().cached_blocks(WorkerId("p"), keys(1, 2, 3)) == 0


async def test_without_workers() -> None:
    house = House()
    with pytest.raises(Unavailable, match="no worker is ready"):
        house.conductor.place(query("one"))
