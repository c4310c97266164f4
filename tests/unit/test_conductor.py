"""The conductor's memory of traffic, and the live state that decisions are made from."""

from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Generation, RequestId, WorkerId
from baton.core.load import Load
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from conductor import traffic
from conductor.conductor import UNREPORTED_SECONDS, Conductor
from conductor.mirror import Mirror
from conductor.policy.placement import PlacementConfig
from conductor.policy.snapshot import Query, WorkerView
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
        self.mirror = Mirror()
        self.conductor = Conductor(self.membership, self.mirror, self.clock, PlacementConfig())

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
    # The end of the older prefix is forgotten.
    assert placed.cached_blocks(WorkerId("a"), keys(1, 2)) == 1
    assert placed.cached_blocks(WorkerId("a"), keys(2)) == 0
    assert placed.cached_blocks(WorkerId("a"), keys(3, 4)) == 2
    placed.record(WorkerId("b"), keys(1))  # used again
    placed.record(WorkerId("b"), keys(5))
    assert placed.cached_blocks(WorkerId("a"), keys(3, 4)) == 1
    assert [placed.cached_blocks(WorkerId(name), keys(1)) for name in "ab"] == [1, 1]


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
    house.conductor.place(query("two", 32, keys(1, 2)))
    assert house.conductor.snapshot().cached_blocks(WorkerId("p"), keys(1, 2, 3)) == 2


async def test_what_everybody_shares_is_noticed() -> None:
    house = House()
    await house.announce(member("p", Role.PREFILL), member("d", Role.DECODE))
    for number in range(20):
        house.conductor.place(query(str(number), 32, keys(0, number + 1)))
    share = house.conductor.snapshot().share
    assert [share(key) for key in keys(0, 1, 99)] == [1.0, 0.05, 0.0]


async def test_a_snapshot_holds_those_that_take_requests() -> None:
    house = House()
    loads = {"running": 2, "waiting": 1, "queued_tokens": 30}
    busy = member("p0", Role.PREFILL, **loads)
    leaving = replace(member("p1", Role.PREFILL), state=WorkerState.DRAINING)
    await house.announce(busy, leaving, member("d0", Role.DECODE), member("s", Role.KVSTORE))
    house.conductor.place(query("one", 50))
    snapshot = house.conductor.snapshot()
    assert snapshot.prefills == (WorkerView(busy, sent_requests=1, sent_tokens=50),)
    assert [view.id for view in snapshot.decodes] == ["d0"]
    assert house.conductor.members == [
        member("d0", Role.DECODE),
        busy,
        leaving,
        member("s", Role.KVSTORE),
    ]


async def test_a_worker_alone_is_sent_to_once() -> None:
    house = House()
    await house.announce(member("d", Role.DECODE))
    decision = house.conductor.place(query("one", 48, keys(1, 2, 3)))
    assert (decision.prefill, decision.decode.id) == (None, "d")
    snapshot = house.conductor.snapshot()
    assert (snapshot.decodes[0].num_requests, snapshot.decodes[0].queued_tokens) == (1, 48)
    assert snapshot.cached_blocks(WorkerId("d"), keys(1, 2, 3)) == 3


async def test_a_conversation_stays_where_it_is() -> None:
    house = House()
    await house.announce(
        *(member(f"p{n}", Role.PREFILL) for n in range(4)), member("d", Role.DECODE)
    )
    turns = [keys(*range(end)) for end in (4, 8, 12)]
    homes = []
    for turn in turns:
        decision = house.conductor.place(query(f"turn {len(turn)}", 16 * len(turn) + 5, turn))
        homes.append((decision.prefill.id, decision.prefill_scores[0].cached_blocks))
        house.clock.advance(60.0)
    assert [cached for _, cached in homes] == [0, 4, 8]
    assert len({home for home, _ in homes}) == 1


async def test_a_refused_request_leaves_no_trace() -> None:
    house = House()
    with pytest.raises(Unavailable, match="no worker is ready"):
        house.conductor.place(query("one", 48, keys(1)))
    await house.announce(member("p", Role.PREFILL), member("d", Role.DECODE))
    snapshot = house.conductor.snapshot()
    assert snapshot.prefills[0].num_requests == 0
    assert snapshot.cached_blocks(WorkerId("p"), keys(1)) == 0
