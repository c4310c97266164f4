"""The live conductor: what it makes of the registry, of reports and of what it sent itself."""

import math
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.member import Member
from baton.core.placement import MAX_ALTERNATIVES, Placement
from baton.core.states import Role, WorkerState
from baton.core.store import StoreHint, Tier, WatchEvent
from baton.core.worker_load import QueuedWork, WorkerLoad
from baton.errors import Invalid, Overloaded, Unavailable
from baton.registry.member_codec import MAX_NUMBER, MIN_RATE
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from conductor.conductor import MAX_REGISTRY_AGE_SECONDS, Conductor, ConductorConfig
from conductor.policy.policies import PLACEMENT_POLICIES
from conductor.policy.snapshot import (
    DecodeView,
    LinkSpeed,
    PrefillView,
    QueuedPrefill,
    StoredPrefix,
)
from conductor.prefill_costs import MAX_MEASUREMENT_AGE_SECONDS, PRIOR_PREFILL_COST
from conductor.store_mirror import StoreMirror
from conductor.worker_directory import (
    MAX_REPORT_AGE_SECONDS,
    PRIOR_DECODE_COST,
    UNKNOWN_CAPACITY_TOKENS,
)

READS = PrefillCost(0.0, 0.001, 0.0)
WRITES = DecodeCost(0.01, 0.001, 0.0)


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def member(name: str, role: Role, generation: int = 1, host: str = "", **load: object) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(generation), WorkerState.READY,
        block_tokens=16, host=host, load=WorkerLoad(**load),  # type: ignore[arg-type]
    )  # fmt: skip


def reader(name: str, **load: object) -> Member:
    given = {"at_seconds": 1e9, "prefill_cost": READS, "prefill_error": 0.0}
    return member(name, Role.PREFILL, **(given | load))  # type: ignore[arg-type]


def writer(name: str, **load: object) -> Member:
    given = {"at_seconds": 1e9, "decode_cost": WRITES, "num_blocks": 1000}
    return member(name, Role.DECODE, **(given | load))  # type: ignore[arg-type]


class Clock(ManualClock):
    """Wall time of its own."""

    def wall_nanoseconds(self) -> int:
        return int((1e9 + self.monotonic()) * 1e9)


class House:
    def __init__(self, read_alone: bool = False, **config: object) -> None:
        self.clock = Clock(100.0)
        self.registry = MemoryRegistry(self.clock)
        self.membership = Membership(self.registry, self.clock)
        self.mirror = StoreMirror()
        settings = ConductorConfig(read_alone=read_alone, **config)  # type: ignore[arg-type]
        self.conductor = Conductor(self.membership, self.mirror, self.clock, settings)

    async def announce(self, *members: Member) -> None:
        """As reports of now, unless one says when it was made."""
        for one in members:
            if one.load.at_seconds == 1e9:
                wall = self.clock.wall_nanoseconds() / 1e9
                one = replace(one, load=replace(one.load, at_seconds=wall))
            await self.registry.announce(one, 1e6)
        await self.membership.refresh()

    def place(
        self, name: str, tokens: int = 64, chain: tuple[BlockKey, ...] = (), epoch: int = 1,
        excluded: frozenset[str] = frozenset(), session: str = "",
    ) -> Placement:  # fmt: skip
        return self.conductor.place(
            request_id=name, epoch=epoch, num_tokens=tokens, max_new_tokens=16, keys=chain,
            excluded=excluded, session=session,
        )  # fmt: skip

    def reader(self, name: str) -> PrefillView:
        return self.conductor.snapshot().prefills[name]

    def writer(self, name: str) -> DecodeView:
        return self.conductor.snapshot().decodes[name]

    def hold(self, node: str, *held: BlockKey) -> None:
        page = WatchEvent(Incarnation(1), 0, Tier.DRAM, held, reset=True)
        assert self.mirror.apply(WorkerId(node), page)


# -- members that say anything ---------------------------------------------------------------


@pytest.mark.parametrize("number", [0, MIN_RATE, MAX_NUMBER])
async def test_no_report_keeps_the_others_from_being_placed(number: float) -> None:
    """Whatever the codec lets through, a conductor can compute with."""
    house, count = House(read_alone=True), int(number)
    wild = {
        "running": count, "waiting": count, "queued_tokens": count, "num_blocks": count,
        "free_blocks": count, "decode_requests": count, "context_tokens": count,
        "promised_tokens": count, "answer_tokens": number, "short_answer_tokens": number,
        "prefill_cost": PrefillCost(number, number, number), "prefill_error": number,
        "decode_cost": DecodeCost(number, number, number),
        "queue": tuple(QueuedWork(due, number) for due in (-number, number, None)),
        "link_bytes_per_second": max(number, MIN_RATE),
    }  # fmt: skip
    await house.announce(
        reader("p0"), reader("p1", **wild), writer("d0"), writer("d1", **wild),
        reader("p2", **wild), writer("d2", **wild),
    )  # fmt: skip
    for turn in range(20):
        placement = house.place(str(turn))
        assert placement.decode is not None
        house.clock.advance(0.3)
        await house.announce(reader("p1", **wild), writer("d1", **wild))


# -- sessions -------------------------------------------------------------------------------


async def test_a_session_is_read_at_one_place_where_nothing_else_decides() -> None:
    house = House()
    await house.announce(*(reader(f"p{number}") for number in range(8)), writer("d0"))

    def place_of(session: str) -> set[str]:
        placements = []
        for number in range(4):
            house.clock.advance(60)  # what was placed has been read
            placements.append(house.place(f"{session}/{number}", 8, session=session))
        return {placement.prefill.id for placement in placements if placement.prefill}

    assert all(len(place_of(f"s{number}")) == 1 for number in range(4))


# -- who is there --------------------------------------------------------------------------


async def test_a_snapshot_holds_those_that_take_requests() -> None:
    house = House()
    leaving = replace(reader("p1"), state=WorkerState.DRAINING)
    await house.announce(reader("p0"), leaving, writer("d0"), member("s", Role.KVSTORE))
    snapshot = house.conductor.snapshot()
    assert (snapshot.prefills.ids, snapshot.decodes.ids) == (("p0",), ("d0",))
    members, ring = house.conductor.describe()
    assert len(members) == 4 and ring == "d0 p0 p1"
    await house.announce(replace(reader("p0"), state=WorkerState.DRAINING), reader("p1"))
    assert house.conductor.snapshot().prefills.ids == ("p1",)
    await house.registry.withdraw(WorkerId("d0"), Incarnation(1))
    await house.membership.refresh()
    assert house.conductor.snapshot().decodes.ids == ()


async def test_who_is_to_end_gets_nothing_more_at_once() -> None:
    """Before the registry knows, and until the hint is taken back."""
    house = House()
    await house.announce(reader("p"), writer("d"), writer("e"))
    house.conductor.snapshot()
    house.conductor.leave(frozenset({WorkerId("e"), WorkerId("of another role")}))
    assert [view.id for view in house.conductor.snapshot().decodes] == ["d"]
    assert {house.place(f"r{n}").decode.id for n in range(20)} == {"d"}
    house.conductor.leave(frozenset())
    assert {view.id for view in house.conductor.snapshot().decodes} == {"d", "e"}


async def test_nothing_is_looked_at_while_the_registry_was_not() -> None:
    house = House()
    await house.announce(reader("p"), writer("d"))
    house.conductor.snapshot()
    house.membership.members.clear()
    assert house.conductor.snapshot().prefills.ids == ("p",)


async def test_nobody_all_draining_or_one_pool_only() -> None:
    house = House()
    with pytest.raises(Unavailable, match="no worker is ready"):
        house.place("one", 48, keys(1))
    leaving = [replace(one, state=WorkerState.DRAINING) for one in (reader("p"), writer("d"))]
    await house.announce(*leaving)
    with pytest.raises(Unavailable, match="no worker is ready"):
        house.place("two", 48, keys(1))
    await house.announce(writer("d"))
    alone = house.place("three", 48, keys(1))
    assert (alone.prefill, alone.decode.id) == (None, "d")
    assert alone.reason == "no prefill worker is ready"
    assert house.writer("d").num_requests == 1
    await house.announce(replace(writer("d"), state=WorkerState.DRAINING), reader("p"))
    alone = house.place("four", 48, keys(1))
    assert (alone.prefill, alone.decode.id) == (None, "p")
    assert alone.ttft_seconds == pytest.approx(0.048)
    assert house.reader("p").num_requests == 1


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
async def test_every_policy_lives_with_what_happens(policy: str) -> None:
    house = House(policy=policy)
    with pytest.raises(Unavailable, match="no worker is ready"):
        house.place("nobody")
    await house.announce(reader("p0"), reader("p1"), writer("d0"), writer("d1"))
    for number in range(4):
        assert house.place(f"r{number}", 40, keys(1, 2)).policy == policy
    again = house.place("r0", 40, keys(1, 2), 2, frozenset({"p0", "d1"}))
    assert again.prefill is not None
    assert (again.prefill.id, again.decode.id) == ("p1", "d0")
    alone = house.place("r0", 40, keys(1, 2), 3, frozenset({"p0", "p1", "d0"}))
    assert (alone.prefill, alone.decode.id) == (None, "d1")
    alone = house.place("r0", 40, keys(1, 2), 4, frozenset({"p0", "d0", "d1"}))
    assert (alone.prefill, alone.decode.id) == (None, "p1")
    await house.announce(*(replace(w, state=WorkerState.DRAINING) for w in (reader("p0"),)))
    assert house.place("r9", 40, keys(1, 2)).prefill.id == "p1"  # type: ignore[union-attr]


def test_a_policy_that_there_is_not() -> None:
    with pytest.raises(Invalid, match="there is no policy 'best'; there are baton, full_scan"):
        House(policy="best")


# -- reports -------------------------------------------------------------------------------


async def test_reports_become_views() -> None:
    house = House()
    queue = (QueuedWork(1.0, 0.25), QueuedWork(None, 0.5))
    await house.announce(
        reader("p", queue=queue, running=1, waiting=2, queued_tokens=750, answer_tokens=80.0),
        writer("d", decode_requests=3, context_tokens=600, promised_tokens=900,
               answer_tokens=120.0, short_answer_tokens=7.0, link_bytes_per_second=1e8),
    )  # fmt: skip
    snapshot = house.conductor.snapshot()
    view = snapshot.prefills["p"]
    assert (view.cost, view.measured) == (READS, True)
    assert view.queue == [QueuedPrefill(pytest.approx(101.0), 0.25), QueuedPrefill(math.inf, 0.5)]
    assert view.free_at_seconds == pytest.approx(100.75)
    assert (view.num_requests, view.queued_tokens) == (3, 750)
    other = snapshot.decodes["d"]
    assert (other.cost, other.capacity_tokens, other.measured) == (WRITES, 16_000, True)
    assert (other.num_requests, other.context_tokens, other.promised_tokens) == (3, 600, 900)
    assert (snapshot.answer_tokens, snapshot.short_answer_tokens) == (100.0, 7.0)
    assert snapshot.link == LinkSpeed(1e8, 1e8)


async def test_who_has_measured_nothing_is_taken_for_another_of_its_pool() -> None:
    house = House()
    new = member("p0", Role.PREFILL, at_seconds=1e9, running=1, queued_tokens=100)
    await house.announce(new, member("d0", Role.DECODE))
    view, other = house.reader("p0"), house.writer("d0")
    assert (view.cost, view.measured) == (PRIOR_PREFILL_COST, False)
    assert view.queue == [QueuedPrefill(math.inf, pytest.approx(0.01))]
    assert (other.cost, other.capacity_tokens) == (PRIOR_DECODE_COST, UNKNOWN_CAPACITY_TOKENS)
    house.clock.advance(1.0)
    await house.announce(new, reader("p1"), writer("d1"))
    house.clock.advance(1.0)
    await house.announce(new, member("d0", Role.DECODE, at_seconds=1e9))
    view, other = house.reader("p0"), house.writer("d0")
    assert (view.cost, view.measured) == (READS, False)
    assert view.queue == [QueuedPrefill(math.inf, pytest.approx(0.1))]
    assert (other.cost, other.measured) == (WRITES, False)


async def test_what_was_sent_counts_until_it_is_reported() -> None:
    house = House()
    await house.announce(reader("p"), writer("d"))
    for name in ("one", "two"):
        house.place(name, 50)
    assert house.reader("p").num_requests == 2
    assert house.reader("p").free_at_seconds == pytest.approx(100.1)
    assert house.writer("d").promised_tokens == 2 * (50 + 16)
    house.clock.advance(0.01)
    # The same report again is no news.
    await house.membership.refresh()
    assert house.reader("p").num_requests == 2
    house.place("three", 50)
    made = house.clock.wall_nanoseconds() / 1e9
    house.clock.advance(0.01)
    house.place("four", 50)
    house.clock.advance(0.01)
    await house.announce(
        reader("p", at_seconds=made, running=3), writer("d", at_seconds=made, decode_requests=3)
    )
    assert house.reader("p").num_requests == 3 + 1
    assert house.writer("d").num_requests == 3 + 1


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
async def test_a_workers_clock_need_not_be_right(skew: float) -> None:
    house = House()
    await house.announce(reader("p", at_seconds=1e9 + 100 + skew), writer("d"))
    assert house.reader("p").busy_until_seconds in (100.0, 100.0 - MAX_REPORT_AGE_SECONDS)
    house.place("one", 50)
    house.clock.advance(0.5)
    await house.membership.refresh()
    assert house.reader("p").num_requests == 1
    house.place("two", 50)
    house.clock.advance(0.5)
    # What is new at this look was made since the last one, when the first was sent already.
    await house.announce(reader("p", at_seconds=1e9 + 100.9 + skew, running=1))
    assert house.reader("p").num_requests in ((1, 2) if skew < 0 else (1,))
    assert 100.5 <= house.reader("p").busy_until_seconds <= 101.0


async def test_a_burst_is_spread() -> None:
    house = House()
    await house.announce(*(reader(f"p{n}") for n in range(4)), *(writer(f"d{n}") for n in range(2)))
    chosen = [house.place(str(number)) for number in range(40)]
    prefills = [one.prefill.id for one in chosen if one.prefill]
    decodes = [one.decode.id for one in chosen]
    assert sorted(prefills.count(f"p{n}") for n in range(4)) == [10, 10, 10, 10]
    assert sorted(decodes.count(f"d{n}") for n in range(2)) == [20, 20]


async def test_other_conductors_are_taken_to_send_as_much() -> None:
    house = House()
    others = [member(f"c{number}", Role.CONDUCTOR) for number in range(3)]
    others.append(replace(member("c3", Role.CONDUCTOR), state=WorkerState.DRAINING))
    await house.announce(reader("p"), writer("d"), *others)
    house.place("one", 50)
    assert house.reader("p").free_at_seconds == pytest.approx(100.15)


# -- blocks --------------------------------------------------------------------------------


async def test_a_conversation_stays_where_it_is() -> None:
    house = House()
    await house.announce(*(reader(f"p{n}") for n in range(4)), writer("d"))
    homes, at_hand = set(), []
    for length in (4, 8, 12):
        placement = house.place(f"turn {length}", 16 * length + 5, keys(*range(length)))
        assert placement.prefill is not None
        homes.add(placement.prefill.id)
        at_hand.append(placement.prefill_alternatives[0].local_blocks)
        house.clock.advance(60.0)
    assert at_hand == [0, 4, 8] and len(homes) == 1


async def test_a_reborn_worker_holds_nothing() -> None:
    house = House()
    await house.announce(reader("p"), writer("d"))
    house.place("one", 48, keys(1, 2, 3))

    def at_hand() -> int:
        cache = house.conductor.snapshot().cache
        return cache.local_blocks(house.reader("p"), keys(1, 2, 3))

    assert at_hand() == 3
    await house.announce(replace(reader("p"), state=WorkerState.DRAINING))
    house.conductor.snapshot()
    await house.announce(reader("p"))
    assert at_hand() == 3
    house.place("two", 48, keys(1, 2, 3))
    await house.announce(replace(reader("p", running=0), generation=Incarnation(2)))
    assert at_hand() == 0
    assert house.reader("p").num_requests == 0
    house.place("three", 33, keys(1, 2))
    assert at_hand() == 2


@pytest.mark.parametrize("drain_was_seen", [True, False])
async def test_who_changes_its_role_is_the_other_pools(drain_was_seen: bool) -> None:
    house = House()
    await house.announce(reader("w", running=3), reader("p"), writer("d"))
    house.place("one", 48, keys(1, 2, 3), excluded=frozenset({"p"}))
    if drain_was_seen:
        await house.announce(replace(reader("w"), state=WorkerState.DRAINING))
        house.conductor.snapshot()
    house.clock.advance(1.0)
    await house.announce(writer("w", decode_requests=2))
    snapshot = house.conductor.snapshot()
    assert (snapshot.prefills.ids, set(snapshot.decodes.ids)) == (("p",), {"d", "w"})
    assert house.writer("w").num_requests == 2
    house.clock.advance(1.0)
    await house.announce(reader("w", running=1))
    snapshot = house.conductor.snapshot()
    assert (set(snapshot.prefills.ids), snapshot.decodes.ids) == ({"p", "w"}, ("d",))
    assert house.reader("w").num_requests == 1
    # Its pool is the one that it had all the while.
    assert snapshot.cache.local_blocks(house.reader("w"), keys(1, 2, 3)) == 3


async def test_stores_count_for_their_own_host_and_as_a_source() -> None:
    house = House()
    here, there = {"host": "h0"}, {"host": "h1"}
    await house.announce(
        *(replace(reader(f"p{n}", **(here if n < 2 else there)), kv_bytes_per_token=1000)
          for n in range(4)),
        writer("d"),
        member("s0", Role.KVSTORE, **here), member("s1", Role.KVSTORE, **there),  # type: ignore[arg-type]
    )  # fmt: skip
    chain = keys(1, 2, 3, 4)
    house.hold("s0", *chain[:3])
    house.hold("s1", *chain[:1])
    snapshot = house.conductor.snapshot()
    cache = snapshot.cache
    assert [cache.local_blocks(snapshot.prefills[f"p{n}"], chain) for n in range(4)] == [3, 3, 1, 1]
    assert cache.stored(chain) == StoredPrefix("s0", 3)
    assert cache.holders(chain, 2) == ["p0", "p1"]
    placement = house.place("one", 70, chain)
    assert placement.prefill is not None and placement.prefill.id in ("p0", "p1")
    assert placement.store_hint == StoreHint(WorkerId("s0"), 3)
    far = house.place("one", 70, chain, 2, frozenset({"p0", "p1"}))
    assert far.prefill is not None and far.prefill.id in ("p2", "p3")
    assert far.prefill_alternatives[0].fetched_blocks == 2
    assert far.store_hint == StoreHint(WorkerId("s0"), 3)
    house.hold("s1", *chain[:3])
    again = house.place("one", 70, chain, 3, frozenset({"p0", "p1"}))
    assert again.store_hint == StoreHint(WorkerId("s1"), 3)


async def test_what_everybody_shares_is_noticed() -> None:
    house = House()
    await house.announce(reader("p"), writer("d"))
    for number in range(20):
        house.place(str(number), 32, keys(0, number + 1))
    share = house.conductor.snapshot().cache.share
    assert [share(key) for key in keys(0, 1, 99)] == [1.0, 0.05, 0.0]


# -- admission -----------------------------------------------------------------------------


TOO_MUCH = (QueuedWork(1.0, 0.9), QueuedWork(1.7, 0.8), QueuedWork(1.75, 0.5))


async def crowded(**config: object) -> House:
    """Its one reader has more to do in time than it can."""
    house = House(**config)
    await house.announce(reader("p", queue=TOO_MUCH), writer("d"))
    return house


async def test_what_would_be_late_is_refused_and_a_promise_kept() -> None:
    house = await crowded()
    with pytest.raises(Overloaded, match=r"would come 0\.50 s late"):
        house.place("new")
    again = house.place("old", epoch=2)
    assert again.prefill_alternatives[0].late_seconds > 0
    assert again.ttft_seconds == pytest.approx(2.264)


async def test_admission_can_be_off() -> None:
    house = await crowded(admission=False)
    assert house.place("new").prefill is not None


async def test_on_a_cpu_it_is_off_unless_asked_for() -> None:
    for admission, refuses in ((None, False), (True, True)):
        house = await crowded(admission=admission)
        await house.announce(replace(reader("p2", queue=TOO_MUCH), device="cpu"))
        if refuses:
            with pytest.raises(Overloaded):
                house.place("new")
        else:
            assert house.place("new").decode.id == "d"


async def test_who_has_no_news_refuses_nobody() -> None:
    house = await crowded()
    house.registry.reachable = False
    house.clock.advance(MAX_REGISTRY_AGE_SECONDS + 1)
    await house.membership.refresh()
    assert house.place("new").prefill is not None


async def test_an_idle_cluster_refuses_nothing_that_fits() -> None:
    house = House(first_token_seconds=1e-6, token_gap_seconds=1e-6)
    await house.announce(reader("p"), writer("d", num_blocks=5))
    assert house.place("fits", 80).decode.id == "d"
    with pytest.raises(Invalid, match="81 tokens, and the largest decode worker has memory for 80"):
        house.place("never", 81)


async def test_nothing_promised_is_nothing_missed() -> None:
    house = House(first_token_seconds=0.0)
    await house.announce(reader("p", queue=(QueuedWork(None, 500.0),)), writer("d"))
    placement = house.place("patient")
    assert placement.ttft_seconds == pytest.approx(500.064)
    assert placement.prefill_alternatives[0].late_seconds == 0.0


async def test_a_burst_on_new_workers_is_let_in() -> None:
    house = House()
    await house.announce(
        *(member(f"p{n}", Role.PREFILL) for n in range(2)),
        *(member(f"d{n}", Role.DECODE, at_seconds=1e9, num_blocks=4096) for n in range(2)),
    )
    for number in range(64):
        placement = house.place(str(number), 800)
        assert (placement.ttft_seconds, placement.tbt_seconds) == (None, None)


async def test_a_refused_request_leaves_no_trace() -> None:
    house = await crowded()
    before = house.reader("p").num_requests
    with pytest.raises(Overloaded):
        house.place("new", 64, keys(1))
    assert house.reader("p").num_requests == before
    assert house.conductor.snapshot().cache.holders(keys(1), 2) == []


async def test_no_more_is_believed_of_pools_than_they_hold() -> None:
    house = House()
    await house.announce(reader("p", num_blocks=3), writer("d"))
    house.place("old", 32, keys(1, 2))
    house.place("new", 32, keys(3, 4))
    view = house.reader("p")
    cache = house.conductor.snapshot().cache
    assert [cache.local_blocks(view, keys(*each)) for each in ((1, 2), (3, 4))] == [1, 2]


async def test_alternatives_are_bounded() -> None:
    house = House(policy="full_scan")
    await house.announce(*(reader(f"p{n}") for n in range(20)), writer("d"))
    placement = house.place("one")
    assert len(placement.prefill_alternatives) == MAX_ALTERNATIVES
    assert placement.prefill is not None
    assert placement.prefill_alternatives[0].worker == placement.prefill.id


# -- conditional disaggregation ------------------------------------------------------------


async def test_a_decode_worker_may_read_a_short_prompt_itself() -> None:
    house = House(read_alone=True)
    await house.announce(reader("p"), writer("d"))
    placement = house.place("r", 40, keys(1, 2))
    assert (placement.prefill, placement.decode.id) == (None, "d")
    # It has the blocks now, and is not asked to compute more than a gap between tokens.
    again = house.place("r2", 300, keys(*range(1, 19)))
    assert again.prefill is not None
    assert house.conductor.snapshot().cache.local_blocks(PrefillView("d", READS), keys(1, 2)) == 2  # type: ignore[arg-type]


async def test_not_on_a_cpu_unless_told_to() -> None:
    for device, read_alone, alone in (
        ("cpu", None, False), ("cpu", True, True), ("cuda:0", None, True), ("cuda:0", False, False),
    ):  # fmt: skip
        house = House(read_alone=read_alone)  # type: ignore[arg-type]
        await house.announce(reader("p"), replace(writer("d"), device=device))
        assert (house.place("r", 40).prefill is None) is alone, (device, read_alone)


async def test_speeds_that_hardly_differ_are_one() -> None:
    house = House()
    costs = {"p0": 0.001, "p1": 0.00105, "p2": 0.0009, "p3": 0.01}
    members = [reader(n, prefill_cost=PrefillCost(0.0, c, 0.0)) for n, c in costs.items()]
    await house.announce(*members, writer("d"))
    assert paces(house, *costs) == [0.00105, 0.00105, 0.00105, 0.01]


def paces(house: House, *names: str) -> list[float]:
    return [house.reader(name).cost.per_token_seconds for name in names]


def paced(name: str, pace: float, error: float | None) -> Member:
    return reader(name, prefill_cost=PrefillCost(0.0, pace, 0.0), prefill_error=error)


async def test_nor_do_those_that_may_hardly_differ() -> None:
    house = House()
    for error, pace in ((0.3, 0.001), (None, 0.001), (0.1, 0.002)):
        await house.announce(paced("p0", 0.001, 0.0), paced("p1", 0.002, error), writer("d"))
        assert paces(house, "p0", "p1") == [0.001, pace], error


async def test_the_pools_speed_is_that_of_those_who_know() -> None:
    house = House()
    unsure = [paced("p1", 0.003, 0.9), paced("p2", 0.005, None)]
    await house.announce(paced("p0", 0.001, 0.1), *unsure, writer("d"))
    assert paces(house, "p0", "p1", "p2") == [0.001] * 3


async def test_who_was_slow_is_tried_again() -> None:
    house = House()
    fast, slow = paced("p0", 0.001, 0.0), paced("p1", 0.01, 0.0)
    await house.announce(fast, slow, writer("d"))
    assert paces(house, "p0", "p1") == [0.001, 0.01]
    house.clock.advance(MAX_MEASUREMENT_AGE_SECONDS + 1)
    await house.announce(paced("p0", 0.0011, 0.0), slow, writer("d"))
    assert paces(house, "p0", "p1") == [0.0011, 0.0011]
    await house.announce(paced("p0", 0.0011, 0.0), paced("p1", 0.0101, 0.0), writer("d"))
    assert paces(house, "p0", "p1") == [0.0011, 0.0101]
