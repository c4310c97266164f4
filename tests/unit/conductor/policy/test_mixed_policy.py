"""Tests how Baton's policy places requests on mixed workers, alone and beside the two pools."""

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from baton.core.ids import WorkerId
from baton.errors import Invalid, Overloaded, Unavailable
from conductor.load_tracker import (
    DecodeLoadReport,
    LoadTracker,
    MixedLoadReport,
    PrefillLoadReport,
)
from conductor.policy.baton import place
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.decision import Decision
from conductor.policy.policies import get_policy
from conductor.policy.snapshot import MixedView, QueuedPrefill
from tests.cluster_snapshots import (
    BLOCK_TOKENS,
    FakeCache,
    decode,
    mixed,
    prefill,
    query,
    snapshot,
)

CONFIG = BatonPolicyConfig()
OWN = 133 * 0.01
"""The seconds of a whole prompt of :func:`query`."""


def placed(
    *workers: MixedView, cached: Mapping[str, int] = MappingProxyType({}), **fields: object
) -> Decision:
    return place(snapshot([], [], FakeCache(dict(cached)), mixed=workers), query(**fields), CONFIG)


def test_the_whole_request_goes_to_one_worker_with_its_predictions() -> None:
    decision = placed(mixed("m0"))
    assert (decision.prefill, decision.decode) == (None, "m0")
    assert decision.ttft_seconds == pytest.approx(OWN)
    assert decision.itl_seconds == pytest.approx(0.011)


def test_a_worker_with_the_cached_prefix_is_preferred() -> None:
    decision = placed(mixed("m0"), mixed("m1"), mixed("m2"), cached={"m1": 4})
    assert decision.decode == "m1"
    assert decision.service_seconds == pytest.approx((133 - 4 * BLOCK_TOKENS) * 0.01)


def test_waiting_prompts_outweigh_a_cached_prefix() -> None:
    queued = ((60.0, 1.0), (60.0, 2.0))
    assert placed(mixed("m0"), mixed("m1", *queued), cached={"m1": 4}).decode == "m0"


def test_answers_delay_the_prompt_and_prompts_the_answers() -> None:
    busy = mixed("m0", promised=100, prompt_slowdown=1.5, prompt_share=0.5)
    decision = placed(busy)
    assert decision.service_seconds == pytest.approx(1.5 * OWN)
    assert decision.itl_seconds == pytest.approx(0.012 / 0.5)
    assert placed(busy, mixed("m1")).decode == "m1"


def test_a_request_that_would_be_late_or_slow_is_rejected() -> None:
    late = mixed("m0", (1.0, 0.9), (2.0, 2.0))
    with pytest.raises(Overloaded, match="time to first token"):
        placed(late)
    slow = mixed("m0", promised=100, prompt_share=0.9)
    with pytest.raises(Overloaded, match="the inter-token latency would be"):
        placed(slow)
    full = mixed("m0", promised=60_000, capacity=10_000)
    with pytest.raises(Overloaded, match="room for 0 tokens, and 233 are needed"):
        placed(full)
    for worker in (late, slow, full):
        assert placed(worker, must_admit=True).decode == "m0"


def test_a_request_that_fits_no_worker_is_invalid() -> None:
    with pytest.raises(Invalid, match="the largest decode worker has memory for 120"):
        placed(mixed("m0", capacity=120), mixed("m1", capacity=100))


def test_excluded_workers_are_not_chosen() -> None:
    excluded = frozenset({WorkerId("m0")})
    assert placed(mixed("m0"), mixed("m1", (60.0, 3.0)), excluded=excluded).decode == "m1"


def test_baselines_use_the_mixed_worker_with_the_most_memory_that_is_not_excluded() -> None:
    cluster = snapshot([], [], mixed=[mixed("m0"), mixed("m1", promised=10)])
    rule = get_policy("round_robin")
    assert rule(cluster, query()).decode == "m0"
    assert rule(cluster, query(excluded=frozenset({WorkerId("m0")}))).decode == "m1"
    with pytest.raises(Unavailable, match="no worker is ready"):
        rule(cluster, query(excluded=frozenset({WorkerId("m0"), WorkerId("m1")})))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # The pair and the mixed worker are idle: equal costs, so the pair.
        ([mixed("m0")], ("p0", "d0")),
        ([mixed("m0", (60.0, 1.0))], ("p0", "d0")),
    ],
)
def test_a_hybrid_prefers_the_cheaper_of_pair_and_mixed_worker(
    workers: list[MixedView], expected: tuple[str, str]
) -> None:
    pair = snapshot([prefill("p0")], [decode("d0")], mixed=workers)
    decision = place(pair, query(), CONFIG)
    assert (decision.prefill, decision.decode) == expected


def test_a_hybrid_uses_mixed_workers_where_the_pair_is_busy() -> None:
    for busy in (
        snapshot([prefill("p0", (60.0, 1.0))], [decode("d0")], mixed=[mixed("m0")]),
        snapshot([prefill("p0")], [decode("d0", 5000)], mixed=[mixed("m0")]),
        snapshot([], [decode("d0")], mixed=[mixed("m0")]),
    ):
        decision = place(busy, query(), CONFIG)
        assert (decision.prefill, decision.decode) == (None, "m0")


def test_load_of_a_mixed_worker_is_tracked_from_dispatch_and_report() -> None:
    tracker = LoadTracker()
    tracker.add(mixed("m0"))
    request = query()
    decision = place(snapshot([], [], mixed=list(tracker.mixed)), request, CONFIG)
    tracker.record_dispatch(1.0, request, decision, 100.0)
    view = tracker.mixed["m0"]
    assert view.prefill.queue == [QueuedPrefill(1.0 + 2.0 + OWN, OWN)]
    assert (view.decode.num_requests, view.decode.projected_tokens) == (1, 233)
    prompts = PrefillLoadReport(2.0, 0.5, (QueuedPrefill(9.0, 0.25),), 1, 25)
    report = MixedLoadReport(prompts, DecodeLoadReport(2.0, 3, 400, 500), 1.25, 0.75)
    tracker.apply_report(WorkerId("m0"), report)
    assert (view.prefill.free_at_seconds, view.decode.projected_tokens) == (2.75, 500)
    assert (view.prompt_slowdown, view.prompt_share) == (1.25, 0.75)
    tracker.remove(WorkerId("m0"))
    tracker.apply_report(WorkerId("m0"), report)
    assert not len(tracker.mixed)
