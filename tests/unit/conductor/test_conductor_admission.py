"""Tests which requests a conductor refuses because of overload, and when it refuses none."""

from dataclasses import replace

import pytest

from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.placement import PlacementQuery
from baton.core.states import Role
from baton.core.worker_load import QueuedWork
from baton.errors import Invalid, Overloaded
from baton.placement.refusal import PlacementRefused
from baton.rpc.conductor_service import ConductorMethods
from baton.rpc.convert.placement import place_answer_from_proto, placement_query_to_proto
from conductor.limits import MAX_REPORT_AGE_SECONDS
from router.generation.record import GenerationRecord
from tests.unit.conductor.test_conductor import (
    ConductorHarness,
    decode_member,
    keys,
    member,
    prefill_member,
)

OVERLONG_QUEUE = (QueuedWork(1.0, 0.9), QueuedWork(1.7, 0.8), QueuedWork(1.75, 0.5))


async def overloaded_cluster(**config: object) -> ConductorHarness:
    """Return a cluster whose only prefill worker has more work than it can finish in time."""
    cluster = ConductorHarness(**config)
    await cluster.announce(prefill_member("p", queue=OVERLONG_QUEUE), decode_member("d"))
    return cluster


async def test_late_request_is_refused_but_a_replacement_is_placed() -> None:
    cluster = await overloaded_cluster()
    with pytest.raises(Overloaded, match=r"exceed its SLO by 0\.50 s"):
        cluster.place("new")
    again = cluster.place("old", epoch=2)
    assert again.prefill_alternatives[0].late_seconds > 0
    assert again.ttft_seconds == pytest.approx(2.264)


async def test_admission_can_be_turned_off() -> None:
    cluster = await overloaded_cluster(admission=False)
    assert cluster.place("new").prefill is not None


async def test_admission_is_off_on_cpus_unless_configured() -> None:
    for admission, refuses in ((None, False), (True, True)):
        cluster = await overloaded_cluster(admission=admission)
        await cluster.announce(replace(prefill_member("p2", queue=OVERLONG_QUEUE), device="cpu"))
        if refuses:
            with pytest.raises(Overloaded):
                cluster.place("new")
        else:
            assert cluster.place("new").decode.id == "d"


async def test_conductor_with_a_stale_registry_refuses_nothing() -> None:
    cluster = await overloaded_cluster()
    cluster.registry.is_reachable = False
    cluster.clock.advance(MAX_REPORT_AGE_SECONDS + 1)
    await cluster.membership.refresh()
    assert cluster.place("new").prefill is not None


async def test_idle_cluster_refuses_nothing_that_fits() -> None:
    cluster = ConductorHarness(ttft_slo_seconds=1e-6, itl_slo_seconds=1e-6)
    await cluster.announce(prefill_member("p"), decode_member("d", num_blocks=5))
    assert cluster.place("fits", 80).decode.id == "d"
    with pytest.raises(Invalid, match="81 tokens, and the largest decode worker has memory for 80"):
        cluster.place("never", 81)


async def test_prompt_with_an_attention_window_may_be_longer_than_any_workers_memory() -> None:
    cluster = ConductorHarness(ttft_slo_seconds=1e-6, itl_slo_seconds=1e-6)
    await cluster.announce(prefill_member("p"), decode_member("d", num_blocks=5))
    assert cluster.place("fits", 1000, max_attended_tokens=80).decode.id == "d"
    with pytest.raises(Invalid, match="attention window has 81 tokens, and the largest"):
        cluster.place("never", 1000, max_attended_tokens=81)


async def test_without_a_ttft_slo_nothing_counts_as_late() -> None:
    cluster = ConductorHarness(ttft_slo_seconds=0.0)
    await cluster.announce(
        prefill_member("p", queue=(QueuedWork(None, 500.0),)), decode_member("d")
    )
    placement = cluster.place("patient")
    assert placement.ttft_seconds == pytest.approx(500.064)
    assert placement.prefill_alternatives[0].late_seconds == 0.0


async def test_burst_on_workers_without_measurements_is_admitted_until_they_can_measure() -> None:
    """Each prefill worker gets five prompts, 4,000 tokens, and more once it has measured."""
    cluster = ConductorHarness()
    await cluster.announce(
        *(member(f"p{n}", Role.PREFILL) for n in range(2)),
        *(member(f"d{n}", Role.DECODE, at_seconds=1e9, num_blocks=4096) for n in range(2)),
    )
    for number in range(10):
        placement = cluster.place(str(number), 800)
        assert (placement.ttft_seconds, placement.itl_seconds) == (None, None)
    assert [cluster.prefill_view(f"p{n}").num_requests for n in range(2)] == [5, 5]
    with pytest.raises(PlacementRefused, match="are measuring their speed, with 4000 tokens"):
        cluster.place("10", 800)
    await cluster.announce(prefill_member("p0", queue=(QueuedWork(1.9, 0.8),), queued_tokens=800))
    placement = cluster.place("11", 800)
    assert placement.prefill is not None and placement.prefill.id == "p0"
    assert placement.ttft_seconds == pytest.approx(1.6)


async def test_refused_request_changes_no_state() -> None:
    cluster = await overloaded_cluster()
    before = cluster.prefill_view("p").num_requests
    with pytest.raises(Overloaded):
        cluster.place("new", 64, keys(1))
    assert cluster.prefill_view("p").num_requests == before
    assert cluster.conductor.snapshot().cache.workers_with_prefix(keys(1), 2) == []


async def test_refusal_says_what_the_placement_would_have_been() -> None:
    """Over the wire, too: the router's explanation of a refused request has policy, reason,
    predictions and alternatives, and no workers."""
    cluster = await overloaded_cluster()
    with pytest.raises(PlacementRefused) as refused:
        cluster.place("new")
    placement = refused.value.placement
    assert placement.ttft_seconds == pytest.approx(2.264)
    assert placement.prefill_alternatives[0].late_seconds == pytest.approx(0.5, abs=0.01)
    query = placement_query_to_proto(
        PlacementQuery(RequestId("new"), Epoch(1), TenantId(""), 64, 16, (), frozenset(), model="")
    )
    answer = ConductorMethods(cluster.conductor).place(query)
    with pytest.raises(PlacementRefused) as received:
        place_answer_from_proto(answer)
    assert received.value.placement == placement
    assert str(received.value) == str(refused.value)
    assert received.value.retry_after_seconds == refused.value.retry_after_seconds
    explained = GenerationRecord(RequestId("new"), 0.0, 64, refused=placement).explain()
    assert (explained["prefill"], explained["decode"], explained["placements"]) == (None, None, [])
    assert (explained["policy"], explained["reason"]) == ("baton", placement.reason)
    assert explained["predicted"]["ttft_seconds"] == placement.ttft_seconds
    assert [each["worker"] for each in explained["alternatives"]["prefill"]] == ["p"]
