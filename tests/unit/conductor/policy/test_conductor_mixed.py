"""Tests how the live conductor knows mixed workers from their reports, and places requests on
them."""

from dataclasses import replace

import orjson
import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import QueuedWork
from baton.errors import Invalid, Overloaded, Unavailable
from baton.registry.member_codec import member_from_json, member_to_json
from baton.rpc.convert.placement import placement_from_proto, placement_to_proto
from conductor.metrics import placement_kind
from conductor.policy.policies import PLACEMENT_POLICIES
from conductor.policy.snapshot import QueuedPrefill
from tests.unit.conductor.test_conductor import (
    DECODE_COST,
    PREFILL_COST,
    ConductorHarness,
    decode_member,
    keys,
    member,
    prefill_member,
)


def mixed_member(name: str, **load: object) -> Member:
    given = {
        "at_seconds": 1e9, "prefill_cost": PREFILL_COST, "prefill_error": 0.0,
        "decode_cost": DECODE_COST, "num_blocks": 1000,
    }  # fmt: skip
    return member(name, Role.MIXED, **(given | load))  # type: ignore[arg-type]


async def test_report_becomes_a_view_of_prompts_and_answers() -> None:
    cluster = ConductorHarness()
    await cluster.announce(
        mixed_member("m", queue=(QueuedWork(1.0, 0.25),), queued_tokens=250, running=4,
               decode_requests=3, context_tokens=600, promised_tokens=900, prompt_share=0.5,
               prompt_slowdown=1.5, shared_step_seconds=0.05),
    )  # fmt: skip
    snapshot = cluster.conductor.snapshot()
    assert (snapshot.prefills.ids, snapshot.decodes.ids, snapshot.mixed.ids) == ((), (), ("m",))
    view = snapshot.mixed["m"]
    assert (view.prefill.cost, view.prefill.is_measured) == (PREFILL_COST, True)
    assert view.prefill.queue == [QueuedPrefill(pytest.approx(101.0), pytest.approx(0.375))]
    assert (view.prefill.num_requests, view.prefill.queued_tokens) == (4, 250)
    assert (view.decode.cost, view.decode.capacity_tokens) == (DECODE_COST, 16_000)
    assert (view.decode.num_requests, view.decode.context_tokens) == (3, 600)
    assert view.decode.projected_tokens == 900
    assert (view.prompt_share, view.prompt_slowdown) == (0.5, 1.5)
    # Half of the time, a step takes 0.013 s; in the other half, 0.05 s.
    assert view.itl_seconds(0, 0) == pytest.approx(1 / (0.5 / 0.013 + 0.5 / 0.05))


def test_report_can_be_read_back_and_that_of_an_older_version_too() -> None:
    member = mixed_member("m", prompt_share=0.5, prompt_slowdown=1.5, shared_step_seconds=0.05)
    written = member_to_json(member)
    assert member_from_json(written) == member
    raw = orjson.loads(written)
    for name in ("prompt_share", "prompt_slowdown", "shared_step_seconds"):
        del raw["load"][name]
    assert member_from_json(orjson.dumps(raw)) == mixed_member("m")
    raw["load"]["prompt_slowdown"] = -1
    with pytest.raises(Invalid, match="it must be at least 0"):
        member_from_json(orjson.dumps(raw))


async def test_whole_request_goes_to_a_mixed_worker_and_the_placement_says_why() -> None:
    cluster = ConductorHarness()
    await cluster.announce(mixed_member("m0"), mixed_member("m1"))
    placement = cluster.place("a", 64, keys(1, 2, 3, 4))
    assert placement.prefill is None
    assert placement.reason.startswith("mixed worker: 0 of 4 blocks cached, 0 to fetch, starts in")
    assert placement.ttft_seconds == pytest.approx(0.064)
    assert placement.itl_seconds == pytest.approx(0.011)
    assert (placement.prefill_alternatives, placement.decode_alternatives) == ((), ())
    assert {each.worker for each in placement.mixed_alternatives} == {"m0", "m1"}
    assert placement_kind(placement) == "mixed"
    assert placement_from_proto(placement_to_proto(placement)) == placement
    view = cluster.conductor.snapshot().mixed[placement.decode.id]
    assert (view.prefill.num_requests, view.decode.num_requests) == (1, 1)


async def test_prefix_is_used_again_on_the_mixed_worker_that_has_it() -> None:
    cluster = ConductorHarness()
    workers = [mixed_member(f"m{number}") for number in range(5)]
    await cluster.announce(*workers)
    first = cluster.place("a", 64, keys(1, 2, 3))
    for number in range(20):
        cluster.clock.advance(10.0)
        await cluster.announce(*workers)  # the request before has ended
        again = cluster.place(f"b{number}", 80, keys(1, 2, 3, 4 + number))
        assert again.decode.id == first.decode.id
        assert "3 of 4 blocks cached" in again.reason


async def test_mixed_workers_of_nearly_equal_speed_count_as_equal() -> None:
    cluster = ConductorHarness()
    slightly, much = DecodeCost(0.009, 0.001, 0.0), DecodeCost(0.002, 0.001, 0.0)
    await cluster.announce(
        mixed_member("a"), mixed_member("b", decode_cost=slightly), mixed_member("c"),
        mixed_member("d", decode_cost=much),
    )  # fmt: skip
    views = cluster.conductor.snapshot().mixed
    assert {view.id: view.decode.cost for view in views} == {
        "a": DECODE_COST, "b": DECODE_COST, "c": DECODE_COST, "d": much
    }  # fmt: skip


async def test_hybrid_uses_the_pair_while_it_is_idle_and_mixed_workers_beside_it() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("p"), decode_member("d"), mixed_member("m"))
    kinds, reasons = [], []
    for number in range(6):
        placement = cluster.place(str(number), 640)
        kinds.append(placement_kind(placement))
        reasons.append(placement.reason)
        assert [len(each) for each in (
            placement.prefill_alternatives, placement.decode_alternatives,
            placement.mixed_alternatives,
        )] == [1, 1, 1]  # fmt: skip
    assert kinds == ["pair", "mixed"] * 3
    # A fourth prompt of 0.64 s would be done at 2.56 s. It is due at 2.64 s, less 0.3 s of margin.
    with pytest.raises(Overloaded, match=r"exceed its SLO by 0\.22 s"):
        cluster.place("6", 640)
    assert "that of the mixed worker m would be" in reasons[0]
    assert "that of p and d would be" in reasons[1]


async def test_guesses_refuse_no_request() -> None:
    cluster = ConductorHarness(admission=True)
    slow = DecodeCost(1.0, 0.0, 0.0)
    await cluster.announce(
        mixed_member("m", prefill_cost=None, decode_cost=None, queued_tokens=10**6, running=1),
        replace(mixed_member("known", decode_cost=slow), state=WorkerState.DRAINING),
    )
    placement = cluster.place("a")
    assert placement.decode.id == "m"
    assert (placement.ttft_seconds, placement.itl_seconds) == (None, None)
    cluster.clock.advance(1.0)
    await cluster.announce(mixed_member("m", decode_cost=slow, decode_requests=1))
    with pytest.raises(Overloaded, match="inter-token latency"):
        cluster.place("b")


async def test_worker_changes_between_the_pools_and_mixed() -> None:
    cluster = ConductorHarness()
    await cluster.announce(prefill_member("w"), decode_member("d"))
    assert cluster.place("a").prefill is not None
    await cluster.announce(mixed_member("w"))
    snapshot = cluster.conductor.snapshot()
    assert (snapshot.prefills.ids, snapshot.mixed.ids) == ((), ("w",))
    await cluster.announce(decode_member("w"))
    snapshot = cluster.conductor.snapshot()
    assert (snapshot.decodes.ids, snapshot.mixed.ids) == (("d", "w"), ())
    await cluster.announce(replace(decode_member("w"), state=WorkerState.DRAINING))
    assert cluster.conductor.snapshot().decodes.ids == ("d",)


async def test_request_is_placed_again_on_any_kind_of_worker() -> None:
    cluster = ConductorHarness()
    with pytest.raises(Unavailable, match="no worker is ready"):
        cluster.place("a")
    await cluster.announce(prefill_member("p"), decode_member("d"), mixed_member("m"))
    first = cluster.place("a", 640)
    assert first.prefill is not None
    second = cluster.place("a", 650, epoch=2, excluded=frozenset({"p"}))
    assert (second.prefill, second.decode.id) == (None, "m")
    third = cluster.place("a", 660, epoch=3, excluded=frozenset({"m"}))
    assert third.prefill is not None and (third.prefill.id, third.decode.id) == ("p", "d")


@pytest.mark.parametrize("policy", PLACEMENT_POLICIES)
async def test_every_policy_places_on_mixed_workers(policy: str) -> None:
    cluster = ConductorHarness(policy=policy)
    await cluster.announce(mixed_member("m0"), mixed_member("m1"))
    assert cluster.place("a", 40, keys(1, 2)).decode.id in ("m0", "m1")
    assert cluster.place("a", 40, keys(1, 2), 2, frozenset({"m0"})).decode.id == "m1"


async def test_pools_are_not_planned_for_the_load_of_mixed_workers() -> None:
    cluster = ConductorHarness()
    await cluster.announce(mixed_member("m"))
    for number in range(10):
        cluster.place(str(number))
    cluster.clock.advance(5.0)
    assert cluster.conductor.plan_pools() is None
    await cluster.announce(prefill_member("p"), decode_member("d"))
    cluster.place("first of the pair")
    cluster.clock.advance(5.0)
    plan = cluster.conductor.plan_pools()
    assert plan is not None
    assert (plan.serving_prefill, plan.serving_decode, plan.requests_per_second) == (1, 1, 0.2)


async def test_costs_of_mixed_workers_count_for_workers_without_measurements() -> None:
    cluster = ConductorHarness()
    cost = PrefillCost(0.0, 0.002, 0.0)
    await cluster.announce(
        mixed_member("m", prefill_cost=cost), member("p", Role.PREFILL, at_seconds=1e9),
        member("d", Role.DECODE, at_seconds=1e9),
    )  # fmt: skip
    cluster.clock.advance(1.0)
    await cluster.announce(member("d", Role.DECODE, at_seconds=1e9))
    snapshot = cluster.conductor.snapshot()
    assert snapshot.prefills["p"].cost == cost and not snapshot.prefills["p"].is_measured
    assert snapshot.decodes["d"].cost == DECODE_COST and not snapshot.decodes["d"].is_measured
    assert WorkerId("m") in snapshot.mixed
