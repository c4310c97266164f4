"""Tests how the live conductor derives its views from the registry, workers' reports and its own
placements, and what it decides."""

import math
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.core.adapter import AdapterRef, WorkerAdapter
from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockKey, Epoch, Incarnation, RequestId, TenantId, WorkerId
from baton.core.member import Member
from baton.core.placement import MAX_ALTERNATIVES, Placement, PlacementQuery
from baton.core.states import Role, WorkerState
from baton.core.store import Tier, WatchEvent
from baton.core.worker_load import QueuedWork, WorkerLoad
from baton.errors import Invalid, Overloaded, Unavailable
from baton.registry.limits import MAX_NUMBER, MIN_RATE
from baton.registry.membership import Membership
from conductor.admission_rates import REFRESH_REQUESTS
from conductor.conductor import Conductor, ConductorConfig
from conductor.decode_costs import PRIOR_DECODE_COST
from conductor.limits import MAX_REPORT_AGE_SECONDS
from conductor.policy.policies import PLACEMENT_POLICIES
from conductor.policy.snapshot import (
    DecodeView,
    LinkSpeed,
    PrefillView,
    QueuedPrefill,
)
from conductor.prefill_costs import PRIOR_PREFILL_COST
from conductor.store_mirror import StoreMirror
from conductor.worker_directory import UNKNOWN_CAPACITY_TOKENS
from testkit.fakes.registry import MemoryRegistry

PREFILL_COST = PrefillCost(0.0, 0.001, 0.0)
DECODE_COST = DecodeCost(0.01, 0.001, 0.0)


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def member(name: str, role: Role, generation: int = 1, host: str = "", **load: object) -> Member:
    return Member(
        WorkerId(name), role, f"{name}:1", Incarnation(generation), WorkerState.READY,
        block_tokens=16, host=host, load=WorkerLoad(**load),  # type: ignore[arg-type]
    )  # fmt: skip


def prefill_member(name: str, **load: object) -> Member:
    given = {"at_seconds": 1e9, "prefill_cost": PREFILL_COST, "prefill_error": 0.0}
    return member(name, Role.PREFILL, **(given | load))  # type: ignore[arg-type]


def decode_member(name: str, **load: object) -> Member:
    given = {"at_seconds": 1e9, "decode_cost": DECODE_COST, "num_blocks": 1000}
    return member(name, Role.DECODE, **(given | load))  # type: ignore[arg-type]


class Clock(ManualClock):
    """A clock whose wall time starts at 1e9 s."""

    def wall_nanoseconds(self) -> int:
        return int((1e9 + self.monotonic()) * 1e9)


class ConductorHarness:
    def __init__(self, local_prefill: bool = False, **config: object) -> None:
        self.clock = Clock(100.0)
        self.registry = MemoryRegistry(self.clock)
        self.membership = Membership(self.registry, self.clock)
        self.mirror = StoreMirror()
        settings = ConductorConfig(local_prefill=local_prefill, **config)  # type: ignore[arg-type]
        self.conductor = Conductor(self.membership, self.mirror, self.clock, settings)

    async def announce(self, *members: Member) -> None:
        """Announce ``members``. Each load report gets the current time unless the test has set its
        time."""
        for one in members:
            if one.load.at_seconds == 1e9:
                wall = self.clock.wall_nanoseconds() / 1e9
                one = replace(one, load=replace(one.load, at_seconds=wall))
            await self.registry.announce(one, 1e6)
        await self.membership.refresh()

    def place(
        self, name: str, tokens: int = 64, chain: tuple[BlockKey, ...] = (), epoch: int = 1,
        excluded: frozenset[str] = frozenset(), session: str = "",
        adapter: WorkerAdapter | None = None, max_attended_tokens: int | None = None,
    ) -> Placement:  # fmt: skip
        workers = frozenset(map(WorkerId, excluded))
        return self.conductor.place(
            PlacementQuery(
                RequestId(name), Epoch(epoch), TenantId(""), tokens, 16, chain, workers, model="",
                session=session,
                adapter=AdapterRef(adapter.name, adapter.digest) if adapter is not None else None,
                max_attended_tokens=max_attended_tokens,
            )
        )  # fmt: skip

    def prefill_view(self, name: str) -> PrefillView:
        return self.conductor.snapshot().prefills[name]

    def decode_view(self, name: str) -> DecodeView:
        return self.conductor.snapshot().decodes[name]

    def add_stored_blocks(self, node: str, *held: BlockKey) -> None:
        page = WatchEvent(Incarnation(1), 0, Tier.DRAM, held, is_reset=True)
        assert self.mirror.apply(WorkerId(node), page)


# -- members with extreme reports ------------------------------------------------------------


@pytest.mark.parametrize("number", [0, MIN_RATE, MAX_NUMBER])
async def test_extreme_reports_do_not_prevent_placements(number: float) -> None:
    """The conductor can compute with every number that the codec accepts."""
    cluster, count = ConductorHarness(local_prefill=True), int(number)
    wild = {
        "running": count, "waiting": count, "queued_tokens": count, "num_blocks": count,
        "free_blocks": count, "decode_requests": count, "context_tokens": count,
        "promised_tokens": count, "answer_tokens": number, "short_answer_tokens": number,
        "prefill_cost": PrefillCost(number, number, number), "prefill_error": number,
        "decode_cost": DecodeCost(number, number, number),
        "queue": tuple(QueuedWork(due, number) for due in (-number, number, None)),
        "link_bytes_per_second": max(number, MIN_RATE),
        "num_first_tokens": count, "num_late_first_tokens": count,
    }  # fmt: skip
    await cluster.announce(
        prefill_member("p0"), prefill_member("p1", **wild), decode_member("d0"),
        decode_member("d1", **wild),
        prefill_member("p2", **wild), decode_member("d2", **wild),
        member("m0", Role.MIXED, **(wild | {"at_seconds": 1e9, "prompt_share": min(number, 1.0),
               "prompt_slowdown": max(number, 1.0), "shared_step_seconds": number})),
    )  # fmt: skip
    for turn in range(20):
        placement = cluster.place(str(turn))
        assert placement.decode is not None
        cluster.clock.advance(0.3)
        await cluster.announce(prefill_member("p1", **wild), decode_member("d1", **wild))


# -- sessions -------------------------------------------------------------------------------


async def test_requests_of_a_session_go_to_one_prefill_worker_if_all_else_is_equal() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        *(prefill_member(f"p{number}") for number in range(8)), decode_member("d0")
    )

    def place_of(session: str) -> set[str]:
        placements = []
        for number in range(4):
            cluster.clock.advance(60)  # by now the placed prompt has been computed
            placements.append(cluster.place(f"{session}/{number}", 8, session=session))
        return {placement.prefill.id for placement in placements if placement.prefill}

    assert all(len(place_of(f"s{number}")) == 1 for number in range(4))


# -- membership ----------------------------------------------------------------------------


async def test_snapshot_holds_only_ready_workers() -> None:
    cluster = ConductorHarness()
    leaving = replace(prefill_member("p1"), state=WorkerState.DRAINING)
    await cluster.announce(
        prefill_member("p0"), leaving, decode_member("d0"), member("s", Role.KVSTORE)
    )
    snapshot = cluster.conductor.snapshot()
    assert (snapshot.prefills.ids, snapshot.decodes.ids) == (("p0",), ("d0",))
    members, ring = cluster.conductor.describe()
    assert len(members) == 4 and ring == "d0 p0 p1"
    await cluster.announce(
        replace(prefill_member("p0"), state=WorkerState.DRAINING), prefill_member("p1")
    )
    assert cluster.conductor.snapshot().prefills.ids == ("p1",)
    await cluster.registry.withdraw(WorkerId("d0"), Incarnation(1))
    await cluster.membership.refresh()
    assert cluster.conductor.snapshot().decodes.ids == ()


async def test_worker_that_is_about_to_leave_gets_no_more_requests() -> None:
    """A worker in the set that ``set_leaving_workers`` gets receives no requests until a later set
    lacks it, even though the registry does not show that it is leaving."""
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"), decode_member("e"))
    cluster.conductor.snapshot()
    cluster.conductor.set_leaving_workers(frozenset({WorkerId("e"), WorkerId("of another role")}))
    assert [view.id for view in cluster.conductor.snapshot().decodes] == ["d"]
    assert {cluster.place(f"r{n}").decode.id for n in range(20)} == {"d"}
    cluster.conductor.set_leaving_workers(frozenset())
    assert {view.id for view in cluster.conductor.snapshot().decodes} == {"d", "e"}


async def test_request_with_an_adapter_goes_only_where_it_is_loaded() -> None:
    cluster = ConductorHarness()
    sql = WorkerAdapter("sql", b"sql".ljust(16))
    failed = WorkerAdapter("failed", b"failed".ljust(16), "the file is missing")
    await cluster.announce(
        prefill_member("p"), replace(prefill_member("q"), adapters=(sql, failed)),
        decode_member("d"), replace(decode_member("e"), adapters=(sql, failed)),
    )  # fmt: skip
    placed = [cluster.place(f"r{n}", adapter=sql) for n in range(20)]
    assert {(p.prefill and p.prefill.id, p.decode.id) for p in placed} == {("q", "e")}
    assert {cluster.place(f"s{n}").decode.id for n in range(20)} == {"d"}  # the less loaded one
    with pytest.raises(Unavailable, match="no worker has loaded the adapter failed"):
        cluster.place("x", adapter=failed)
    await cluster.announce(replace(decode_member("d"), adapters=(failed, sql)))
    cluster.clock.advance(1.0)
    assert "d" in {cluster.place(f"t{n}", adapter=sql).decode.id for n in range(20)}


async def test_snapshot_is_kept_while_the_registry_was_not_read_again() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"))
    cluster.conductor.snapshot()
    cluster.membership.members.clear()
    assert cluster.conductor.snapshot().prefills.ids == ("p",)


async def test_placement_without_workers_fails_and_with_one_pool_uses_it() -> None:
    cluster = ConductorHarness()
    with pytest.raises(Unavailable, match="no worker is ready"):
        cluster.place("one", 48, keys(1))
    leaving = [
        replace(one, state=WorkerState.DRAINING)
        for one in (prefill_member("p"), decode_member("d"))
    ]
    await cluster.announce(*leaving)
    with pytest.raises(Unavailable, match="no worker is ready"):
        cluster.place("two", 48, keys(1))
    await cluster.announce(decode_member("d"))
    alone = cluster.place("three", 48, keys(1))
    assert (alone.prefill, alone.decode.id) == (None, "d")
    assert alone.reason == "no prefill worker is ready"
    assert cluster.decode_view("d").num_requests == 1
    await cluster.announce(
        replace(decode_member("d"), state=WorkerState.DRAINING), prefill_member("p")
    )
    alone = cluster.place("four", 48, keys(1))
    assert alone.prefill == alone.decode and alone.decode.id == "p"
    assert alone.ttft_seconds == pytest.approx(0.048)
    assert cluster.prefill_view("p").num_requests == 1


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
async def test_every_policy_copes_with_missing_and_excluded_workers(policy: str) -> None:
    cluster = ConductorHarness(policy=policy)
    with pytest.raises(Unavailable, match="no worker is ready"):
        cluster.place("nobody")
    await cluster.announce(
        prefill_member("p0"), prefill_member("p1"), decode_member("d0"), decode_member("d1")
    )
    for number in range(4):
        assert cluster.place(f"r{number}", 40, keys(1, 2)).policy == policy
    again = cluster.place("r0", 40, keys(1, 2), 2, frozenset({"p0", "d1"}))
    assert again.prefill is not None
    assert (again.prefill.id, again.decode.id) == ("p1", "d0")
    alone = cluster.place("r0", 40, keys(1, 2), 3, frozenset({"p0", "p1", "d0"}))
    assert (alone.prefill, alone.decode.id) == (None, "d1")
    alone = cluster.place("r0", 40, keys(1, 2), 4, frozenset({"p0", "d0", "d1"}))
    assert alone.prefill == alone.decode and alone.decode.id == "p1"
    await cluster.announce(
        *(replace(w, state=WorkerState.DRAINING) for w in (prefill_member("p0"),))
    )
    assert cluster.place("r9", 40, keys(1, 2)).prefill.id == "p1"  # type: ignore[union-attr]


def test_unknown_policy_is_rejected() -> None:
    with pytest.raises(Invalid, match="unknown policy 'best'; known policies: baton, full_scan"):
        ConductorHarness(policy="best")


# -- reports -------------------------------------------------------------------------------


async def test_worker_reports_become_views() -> None:
    cluster = ConductorHarness()
    queue = (QueuedWork(1.0, 0.25), QueuedWork(None, 0.5))
    await cluster.announce(
        prefill_member(
            "p", queue=queue, running=1, waiting=2, queued_tokens=750, answer_tokens=80.0
        ),
        decode_member("d", decode_requests=3, context_tokens=600, promised_tokens=900,
               answer_tokens=120.0, short_answer_tokens=7.0, link_bytes_per_second=1e8),
    )  # fmt: skip
    snapshot = cluster.conductor.snapshot()
    view = snapshot.prefills["p"]
    assert (view.cost, view.is_measured) == (PREFILL_COST, True)
    assert view.queue == [QueuedPrefill(pytest.approx(101.0), 0.25), QueuedPrefill(math.inf, 0.5)]
    assert view.free_at_seconds == pytest.approx(100.75)
    assert (view.num_requests, view.queued_tokens) == (3, 750)
    other = snapshot.decodes["d"]
    assert (other.cost, other.capacity_tokens, other.is_measured) == (DECODE_COST, 16_000, True)
    assert (other.num_requests, other.context_tokens, other.projected_tokens) == (3, 600, 900)
    assert (snapshot.answer_tokens, snapshot.short_answer_tokens) == (100.0, 7.0)
    assert snapshot.link == LinkSpeed(1e8, 1e8)


async def test_worker_without_measurements_gets_its_pools_costs() -> None:
    cluster = ConductorHarness()
    new = member("p0", Role.PREFILL, at_seconds=1e9, running=1, queued_tokens=100)
    await cluster.announce(new, member("d0", Role.DECODE))
    view, other = cluster.prefill_view("p0"), cluster.decode_view("d0")
    assert (view.cost, view.is_measured) == (PRIOR_PREFILL_COST, False)
    assert view.queue == [QueuedPrefill(math.inf, pytest.approx(0.01))]
    assert (other.cost, other.capacity_tokens) == (PRIOR_DECODE_COST, UNKNOWN_CAPACITY_TOKENS)
    cluster.clock.advance(1.0)
    await cluster.announce(new, prefill_member("p1"), decode_member("d1"))
    cluster.clock.advance(1.0)
    await cluster.announce(new, member("d0", Role.DECODE, at_seconds=1e9))
    view, other = cluster.prefill_view("p0"), cluster.decode_view("d0")
    assert (view.cost, view.is_measured) == (PREFILL_COST, False)
    assert view.queue == [QueuedPrefill(math.inf, pytest.approx(0.1))]
    assert (other.cost, other.is_measured) == (DECODE_COST, False)


async def test_placed_requests_count_until_a_later_report_includes_them() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"))
    for name in ("one", "two"):
        cluster.place(name, 50)
    assert cluster.prefill_view("p").num_requests == 2
    assert cluster.prefill_view("p").free_at_seconds == pytest.approx(100.1)
    assert cluster.decode_view("d").projected_tokens == 2 * (50 + 16)
    cluster.clock.advance(0.01)
    # The same report again changes nothing.
    await cluster.membership.refresh()
    assert cluster.prefill_view("p").num_requests == 2
    cluster.place("three", 50)
    now_seconds = cluster.clock.wall_nanoseconds() / 1e9
    cluster.clock.advance(0.01)
    cluster.place("four", 50)
    cluster.clock.advance(0.01)
    await cluster.announce(
        prefill_member("p", at_seconds=now_seconds, running=3),
        decode_member("d", at_seconds=now_seconds, decode_requests=3),
    )
    assert cluster.prefill_view("p").num_requests == 3 + 1
    assert cluster.decode_view("d").num_requests == 3 + 1


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
async def test_workers_clock_skew_is_tolerated(skew: float) -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p", at_seconds=1e9 + 100 + skew), decode_member("d"))
    assert cluster.prefill_view("p").busy_until_seconds in (100.0, 100.0 - MAX_REPORT_AGE_SECONDS)
    cluster.place("one", 50)
    cluster.clock.advance(0.5)
    await cluster.membership.refresh()
    assert cluster.prefill_view("p").num_requests == 1
    cluster.place("two", 50)
    cluster.clock.advance(0.5)
    # The next report was made after the last refresh, when the first request had already been sent.
    await cluster.announce(prefill_member("p", at_seconds=1e9 + 100.9 + skew, running=1))
    assert cluster.prefill_view("p").num_requests in ((1, 2) if skew < 0 else (1,))
    assert 100.5 <= cluster.prefill_view("p").busy_until_seconds <= 101.0


async def test_burst_is_spread_evenly() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        *(prefill_member(f"p{n}") for n in range(4)), *(decode_member(f"d{n}") for n in range(2))
    )
    chosen = [cluster.place(str(number)) for number in range(40)]
    prefills = [one.prefill.id for one in chosen if one.prefill]
    decodes = [one.decode.id for one in chosen]
    assert sorted(prefills.count(f"p{n}") for n in range(4)) == [10, 10, 10, 10]
    assert sorted(decodes.count(f"d{n}") for n in range(2)) == [20, 20]


async def test_reserve_for_long_prompts_is_a_setting_that_can_change() -> None:
    config = ConductorConfig(admission=True, ttft_slo_seconds=0.0, itl_slo_seconds=0.2)
    cluster = ConductorHarness(admission=True, ttft_slo_seconds=0.0, itl_slo_seconds=0.2)
    decode = decode_member(
        "d", free_blocks=700, decode_requests=4, promised_tokens=4800, answer_tokens=500.0,
        short_answer_tokens=1.0,
    )  # fmt: skip
    await cluster.announce(prefill_member("p"), decode)

    def refuse_long() -> None:
        with pytest.raises(Overloaded, match="and 12016 are needed"):
            cluster.place("long", 12_000)

    for number in range(REFRESH_REQUESTS // 2):
        cluster.place(f"short-{number}", 16)
        refuse_long()
    for _ in range(10):
        refuse_long()
    with pytest.raises(Overloaded, match="reserves its last 12000 tokens of KV for a longer"):
        cluster.place("short", 16)
    cluster.conductor.set_config(replace(config, max_short_prompt_advantage=1.0))
    assert cluster.place("short", 16).decode.id == "d"


async def test_other_conductors_are_assumed_to_place_as_much() -> None:
    cluster = ConductorHarness()
    others = [member(f"c{number}", Role.CONDUCTOR) for number in range(3)]
    others.append(replace(member("c3", Role.CONDUCTOR), state=WorkerState.DRAINING))
    await cluster.announce(prefill_member("p"), decode_member("d"), *others)
    cluster.place("one", 50)
    assert cluster.prefill_view("p").free_at_seconds == pytest.approx(100.15)


async def test_number_of_reported_alternatives_is_bounded() -> None:
    cluster = ConductorHarness(policy="full_scan")
    await cluster.announce(*(prefill_member(f"p{n}") for n in range(20)), decode_member("d"))
    placement = cluster.place("one")
    assert len(placement.prefill_alternatives) == MAX_ALTERNATIVES
    assert placement.prefill is not None
    assert placement.prefill_alternatives[0].worker == placement.prefill.id
