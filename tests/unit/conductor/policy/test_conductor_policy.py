"""Tests Baton's placement policy, which is a pure function, with exact scores."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.core.placement import ScoredWorker
from baton.errors import Invalid, Overloaded, Unavailable
from baton.placement.hash_ring import ring_successors
from conductor.policy.baton import place
from conductor.policy.candidates import candidates, hash_to_index, ring_key
from conductor.policy.config import (
    MAX_UNMEASURED_TOKENS,
    SLO_MISS_PENALTY,
    BatonPolicyConfig,
)
from conductor.policy.prefill_work import PrefillWork, prefill_work
from conductor.policy.queue_forecast import QueueForecast, forecast_queue
from conductor.policy.snapshot import AdmissionRates, PrefillView, QueuedPrefill, StoredPrefix
from tests.cluster_snapshots import (
    BLOCK_KEYS,
    NOW,
    PREFILL,
    FakeCache,
    decode,
    prefill,
    query,
    snapshot,
)

CONFIG = BatonPolicyConfig()
W = CONFIG.service_weight
OWN = 1.33
"""Seconds to prefill the request on an idle worker with an empty cache."""


def excluding(*names: str) -> dict[str, object]:
    return {"excluded": frozenset(WorkerId(name) for name in names)}


# -- candidates ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "shares", "depth"),
    [
        (4, [], 0),
        (4, [1.0, 0.5, 0.0625, 0.0], 2),  # at most 1/16
        (4, [1.0, 0.5, 0.0626, 0.0], 3),
        (1, [1.0, 0.25], 1),
        (16, [1.0, 0.25, 1 / 64], 2),
        (0, [1.0, 0.25], 1),
    ],
)
def test_ring_key_is_the_first_block_key_that_few_requests_share(
    num_workers: int, shares: list[float], depth: int
) -> None:
    workers = [prefill(f"p{number}") for number in range(num_workers)]
    assert ring_key(snapshot(workers, [], FakeCache(shares=shares)), query()) == BLOCK_KEYS[depth]


def test_ring_key_of_a_fully_shared_prompt_is_the_session_or_request_id() -> None:
    cluster = snapshot([prefill("p")], [], FakeCache(shares=[1.0] * 8))
    assert ring_key(cluster, query("mine")) == b"mine"
    assert ring_key(cluster, query("mine", session="talk")) == b"talk"
    assert ring_key(cluster, replace(query("mine"), keys=())) == b"mine"


def ids_of(views: Sequence[PrefillView]) -> list[str]:
    return [view.id for view in views]


def test_candidates_are_ring_successors_cache_holders_and_a_least_loaded_worker() -> None:
    names = tuple(f"p{number:02}" for number in range(12))
    ring = list(ring_successors(names, BLOCK_KEYS[0]))
    cached = {ring[5]: 1, ring[6]: 3, ring[7]: 2, "stranger": 9}
    idle = sorted(ring[8:])
    workers = [prefill(n) if n in idle else prefill(n, (9.0, 1.0)) for n in names]
    cluster = snapshot(workers, [], FakeCache(cached))
    for number in range(8):
        placement_query = query(f"r{number}")
        least = idle[hash_to_index(placement_query.request_id, 4)]
        found = ids_of(candidates(cluster, placement_query, cluster.prefills, 3, 3, 4))
        assert found == [*ring[:3], ring[6], ring[7], least]
    picks = {hash_to_index(f"r{number}", 4) for number in range(32)}
    assert picks == {0, 1, 2, 3}
    narrow = ids_of(candidates(cluster, query(), cluster.prefills, 1, 0, 1))
    assert narrow == [ring[0], idle[0]]
    without = query(**excluding(ring[0], ring[6], idle[0]))
    assert ids_of(candidates(cluster, without, cluster.prefills, 1, 2, 1)) == [ring[1], idle[1]]


# -- prefill -------------------------------------------------------------------------------


def test_prefill_score_is_queue_time_plus_weighted_service_time() -> None:
    workers = [prefill("p0", (9.0, 0.2)), prefill("p1"), prefill("p2", (9.0, 0.1))]
    decision = place(
        snapshot(workers, [decode("d")], FakeCache({"p0": 2, "p1": 8})), query(), CONFIG
    )
    # The prompt has 133 tokens: 128 are in p1's cache and 32 in p0's.
    assert [each.worker for each in decision.prefill_scores] == ["p1", "p0", "p2"]
    assert [each.score for each in decision.prefill_scores] == pytest.approx(
        [W * 0.05, 0.2 + W * 1.01, 0.1 + W * OWN]
    )
    assert [each.local_blocks for each in decision.prefill_scores] == [8, 2, 0]
    assert (decision.prefill, decision.decode) == ("p1", "d")
    assert decision.service_seconds == pytest.approx(0.05)
    assert decision.ttft_seconds == pytest.approx(0.05)
    assert decision.itl_seconds == pytest.approx(0.011)
    assert decision.reason == (
        "8 of 8 blocks cached, 0 to fetch, starts in 0.000 s, prefill takes 0.050 s, best of 3"
    )
    light = replace(CONFIG, service_weight=0.0)
    by_queue = place(snapshot(workers, [decode("d")], FakeCache({"p0": 8})), query(), light)
    assert [each.worker for each in by_queue.prefill_scores] == ["p1", "p2", "p0"]


def test_last_prompt_token_is_always_computed() -> None:
    cluster = snapshot([prefill("p")], [decode("d")], FakeCache({"p": 8}))
    [scored] = place(cluster, query("r", 128), CONFIG).prefill_scores
    assert scored == ScoredWorker(
        WorkerId("p"), pytest.approx(W * 0.01), 0.0, pytest.approx(0.01), 8
    )


def test_stored_prefix_is_fetched_when_that_is_faster_than_computing() -> None:
    cache = FakeCache({"p": 2}, StoredPrefix("s", 8))
    cluster = snapshot([prefill("p")], [decode("d")], cache)
    work = prefill_work(cluster, query(), cluster.prefills["p"], cache.stored_prefix)
    # Fetching 96 tokens takes 0.096 s, computing them 0.96 s.
    assert work == PrefillWork(pytest.approx(0.05), 2, 6, pytest.approx(0.096))
    decision = place(cluster, query(), CONFIG)
    assert decision.fetch_source == StoredPrefix("s", 8)
    assert decision.prefill_scores[0].fetched_blocks == 6
    assert decision.ttft_seconds == pytest.approx(0.146)
    slow = replace(cluster, kv_bytes_per_token=20_000)
    assert prefill_work(slow, query(), cluster.prefills["p"], cache.stored_prefix) == PrefillWork(
        pytest.approx(1.01), 2
    )
    assert place(slow, query(), CONFIG).fetch_source is None


def test_worker_that_would_be_late_ranks_after_one_in_time() -> None:
    # The request is due in 2 s + 1.33 s, and planned to be done 0.3 s earlier: behind 2 s of work
    # it is 0.3 s late.
    workers = [prefill("p0", (2.5, 2.0)), prefill("p1", (9.0, 3.0))]
    decision = place(snapshot(workers, [decode("d")], FakeCache({"p1": 1})), query(), CONFIG)
    first, second = decision.prefill_scores
    assert (first.worker, first.late_seconds) == ("p1", 0.0)
    # Work that is due later waits for this request, and is still in time.
    assert first.queue_seconds == 0.0
    assert second.late_seconds == pytest.approx(0.3)
    assert second.score == pytest.approx(SLO_MISS_PENALTY + 2.0 + W * OWN)


def test_worker_where_others_would_become_late_ranks_last() -> None:
    workers = [prefill("p0", (3.2, 2.0)), prefill("p1", (9.0, 2.0))]
    placement_query = query(ttft_slo_seconds=1.0)
    decision = place(snapshot(workers, [decode("d")]), placement_query, CONFIG)
    assert [each.worker for each in decision.prefill_scores] == ["p1", "p0"]
    assert [each.score for each in decision.prefill_scores] == pytest.approx(
        [2.0 + W * OWN, SLO_MISS_PENALTY + 2.0 + W * OWN]
    )
    alone = snapshot(workers[:1], [decode("d")])
    with pytest.raises(Overloaded, match="requests admitted earlier would miss their SLO"):
        place(alone, placement_query, CONFIG)


def test_ties_go_to_the_first_worker_on_the_ring() -> None:
    names = tuple(f"{number}" for number in range(6))
    for number in range(20):
        placement_query = query(f"request {number}")
        placement_query = replace(placement_query, keys=(bytes([number]) * 16,))
        cluster = snapshot([prefill(n) for n in names], [decode(n) for n in names])
        decision = place(cluster, placement_query, CONFIG)
        assert decision.prefill == next(ring_successors(names, placement_query.keys[0]))
        assert decision.decode == next(ring_successors(names, placement_query.request_id.encode()))


def test_decision_does_not_depend_on_the_order_of_the_views() -> None:
    workers = [prefill(f"p{number}", (9.0, number % 3 + 0.1)) for number in range(7)]
    others = [decode(f"d{number}", 100 * (number % 2)) for number in range(5)]
    for number in range(20):
        placement_query = query(f"request {number}")
        cache = FakeCache({"p3": 1})
        turned = snapshot(workers[::-1], others[::-1], cache)
        assert place(turned, placement_query, CONFIG) == place(
            snapshot(workers, others, cache), placement_query, CONFIG
        )


def test_full_scan_scores_all_workers() -> None:
    workers = [prefill(f"p{number}", (50.0, 20.0 - number)) for number in range(20)]
    cluster = snapshot(workers, [decode("d")])
    placement_query = query(ttft_slo_seconds=60.0, **excluding("p19"))
    decision = place(cluster, placement_query, replace(CONFIG, full_scan=True))
    assert decision.prefill == "p18" and len(decision.prefill_scores) == 19
    assert len(place(cluster, placement_query, CONFIG).prefill_scores) <= 4


# -- decode --------------------------------------------------------------------------------


def test_decode_worker_with_the_fewest_reserved_tokens_is_chosen() -> None:
    others = [decode("d0", 4000), decode("d1", 1000), decode("d2", 1000, 2000)]
    scores = place(snapshot([prefill("p")], others), query(), CONFIG).decode_scores
    # The request needs 133 tokens for its prompt and 100 for its answer.
    assert [each.worker for each in scores] == ["d1", "d0", "d2"]
    assert [each.score for each in scores] == pytest.approx([0.1233, 0.4233, 0.6165])
    assert [each.service_seconds for each in scores] == pytest.approx([0.012] * 3)


def test_decode_worker_that_would_be_too_slow_ranks_last() -> None:
    others = [decode("d0", 4000), decode("d1", 1000, num_requests=40)]
    scores = place(snapshot([prefill("p")], others), query(), CONFIG).decode_scores
    assert [each.worker for each in scores] == ["d0", "d1"]
    assert scores[1].score == pytest.approx(SLO_MISS_PENALTY + 0.1233)
    assert scores[1].late_seconds == pytest.approx(0.001)


def test_decode_worker_that_could_never_hold_the_request_is_no_candidate() -> None:
    others = [decode("d0", 0, 100), decode("d1", 5000)]
    decision = place(snapshot([prefill("p")], others), query(), CONFIG)
    assert [each.worker for each in decision.decode_scores] == ["d1"]


# -- refusals ------------------------------------------------------------------------------


def test_request_without_memory_is_refused_unless_already_admitted() -> None:
    full = decode("d", 9900, num_requests=9)
    cluster = snapshot([prefill("p")], [full])
    # The 133 missing tokens become free within 133 / 9900 of an answer's 1.9 s. With 31 ms to spare
    # for each of 16 tokens, even a short answer makes up for that.
    patient = query(itl_slo_seconds=0.05)
    assert place(cluster, patient, CONFIG).decode == "d"
    hasty = query(itl_slo_seconds=0.02)
    with pytest.raises(Overloaded, match="room for 100 tokens, and 233 are needed") as refusal:
        place(replace(cluster, short_answer_tokens=0.0), hasty, CONFIG)
    assert refusal.value.retry_after_seconds == 0.1
    for let_in in (replace(CONFIG, admission=False), CONFIG):
        placement_query = replace(hasty, must_admit=let_in.admission)
        assert place(cluster, placement_query, let_in).decode == "d"


def test_idle_worker_refuses_nothing_that_it_can_hold() -> None:
    cluster = snapshot([prefill("p")], [decode("d", 0, 140)])
    assert place(cluster, query(ttft_slo_seconds=1e-6, itl_slo_seconds=1e-6), CONFIG)


def test_late_request_is_refused_with_a_retry_after() -> None:
    cluster = snapshot([prefill("p", (2.5, 2.0))], [decode("d")])
    with pytest.raises(Overloaded, match=r"exceed its SLO by 0\.30 s") as refusal:
        place(cluster, query(), CONFIG)
    assert refusal.value.retry_after_seconds == pytest.approx(0.3)
    assert place(cluster, query(must_admit=True), CONFIG).prefill == "p"
    assert place(cluster, query(ttft_slo_seconds=math.inf), CONFIG).prefill == "p"


def test_margin_changes_the_admission_and_not_the_place_in_the_queue() -> None:
    """The last prompts' deadlines are within the margin before the new prompt's deadline, so they
    are computed first."""
    recent = prefill("p", (3.1, 0.8), (3.2, 0.8))
    decision = place(snapshot([recent], [decode("d")]), query(), CONFIG)
    assert (decision.prefill, decision.ttft_seconds) == ("p", pytest.approx(1.6 + OWN))


def test_margin_grows_by_the_learned_share_of_the_slo() -> None:
    def refusal(late_margin: float) -> str:
        view = prefill("p", (1.0, 1.0), late_margin=late_margin)
        try:
            place(snapshot([view], [decode("d")]), query(), CONFIG)
        except Overloaded as error:
            return str(error)
        return ""

    # The first token is predicted for 2.33 s. The deadline is at 3.33 s, less a margin of 0.3 s.
    assert [refusal(share) for share in (0.0, 0.34)] == ["", ""]
    assert refusal(0.36) == "the time to first token would exceed its SLO by 0.02 s"
    assert refusal(0.75) == "the time to first token would exceed its SLO by 0.80 s"
    idle = prefill("p", late_margin=0.75)
    assert place(snapshot([idle], [decode("d")]), query(), CONFIG).prefill == "p"


def test_unmeasured_prefill_worker_gets_as_many_prompts_as_it_needs_to_measure() -> None:
    most = MAX_UNMEASURED_TOKENS - 133
    full = prefill("p0", (9.0, 0.1), is_measured=False, queued_tokens=most + 1)
    for room in (most, 0):
        view = prefill("p0", (9.0, 0.1), is_measured=False, queued_tokens=room)
        assert place(snapshot([view], [decode("d")]), query(), CONFIG).prefill == "p0"
    idle = prefill("p0", is_measured=False)
    long = query("long", MAX_UNMEASURED_TOKENS + 1)
    assert place(snapshot([idle], [decode("d")]), long, CONFIG).prefill == "p0"
    for max_new_tokens in (1, 1000):
        request = replace(query(), max_new_tokens=max_new_tokens)
        with pytest.raises(Overloaded, match="their speed, with 3964 tokens") as refusal:
            place(snapshot([full], [decode("d")]), request, CONFIG)
        assert refusal.value.retry_after_seconds == 1.0
    assert place(snapshot([full], [decode("d")]), query(must_admit=True), CONFIG).prefill == "p0"
    other = prefill("p1", (1.0, 0.9))
    assert place(snapshot([full, other], [decode("d")]), query(), CONFIG).prefill == "p1"


def test_request_that_would_miss_the_itl_slo_is_refused() -> None:
    cluster = snapshot([prefill("p")], [decode("d", 1000, num_requests=40)])
    with pytest.raises(
        Overloaded, match=r"would be 0\.051 s, which is more than the SLO of 0\.050 s"
    ):
        place(cluster, query(), CONFIG)


def test_requests_are_not_refused_on_unmeasured_costs() -> None:
    guessed = prefill("p", (2.5, 2.0), is_measured=False)
    slow = decode("d", 1000, num_requests=40, is_measured=False)
    decision = place(snapshot([guessed], [slow]), query(), CONFIG)
    assert (decision.prefill, decision.decode) == ("p", "d")
    assert decision.prefill_scores[0].score == pytest.approx(2.0 + W * OWN)
    assert decision.prefill_scores[0].late_seconds == 0.0


def test_memory_is_reserved_for_long_prompts_when_they_are_refused_more_often() -> None:
    unfair = AdmissionRates((100, 200, 300), (1.0, 1.0, 1.0, 0.9), large_tokens=500)
    nearly_full = decode("d", 9400, num_requests=9)
    cluster = snapshot([prefill("p")], [nearly_full], admitted=unfair)
    cluster = replace(cluster, short_answer_tokens=0.0)
    with pytest.raises(Overloaded, match="reserves its last 500 tokens of KV for a longer prompt"):
        place(cluster, query("short", 133), CONFIG)
    assert place(cluster, query("long", 301), CONFIG).decode == "d"
    fair = replace(cluster, admission_rates=replace(unfair, admitted_shares=(1.0, 1.0, 1.0, 0.99)))
    assert place(fair, query("short", 133), CONFIG).decode == "d"


def test_request_larger_than_any_decode_worker_is_invalid() -> None:
    others = [decode("d0", 0, 100), decode("d1", 0, 132)]
    for placement_query in (query(), query(must_admit=True), query(**excluding("d1"))):
        with pytest.raises(Invalid, match=r"has 133 tokens, and the largest .* for 132"):
            place(snapshot([prefill("p")], others), placement_query, CONFIG)


def test_placement_with_empty_or_excluded_pools() -> None:
    workers, others = [prefill("p0"), prefill("p1", (9.0, 1.0))], [decode("d0"), decode("d1", 99)]
    cluster = snapshot(workers, others, FakeCache({"p0": 8}, StoredPrefix("s", 4)))
    decision = place(cluster, query(**excluding("p0", "d0")), CONFIG)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    alone = place(cluster, query(**excluding("p0", "p1", "d0")), CONFIG)
    assert (alone.prefill, alone.decode, alone.reason) == (None, "d1", "no prefill worker is ready")
    assert (alone.itl_seconds, alone.fetch_source) == (pytest.approx(0.012), StoredPrefix("s", 4))
    reader = place(cluster, query(**excluding("d0", "d1")), CONFIG)
    assert (reader.prefill, reader.decode) == ("p0", "p0")
    assert reader.reason.startswith("no decode worker is ready: 8 of 8 blocks cached")
    assert (reader.service_seconds, reader.ttft_seconds) == (pytest.approx(0.05),) * 2
    for nobody in (snapshot([], []), cluster):
        with pytest.raises(Unavailable, match="no worker is ready"):
            place(nobody, query(**excluding("p0", "p1", "d0", "d1")), CONFIG)


# -- queue forecast ------------------------------------------------------------------------


def test_queue_forecast_is_ordered_by_deadline() -> None:
    view = prefill("p", (1.0, 0.5), (3.0, 1.0), (5.0, 1.0))
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 0.5) == QueueForecast(NOW + 1.0, 0)
    assert forecast_queue(view, NOW, NOW, NOW + 9.0, 0.5) == QueueForecast(NOW + 3.0, 0)
    # The new work is inserted before the second entry, which then ends at 4.0 s; the third ends at
    # 5.0 s.
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 2.0) == QueueForecast(NOW + 2.5, 1)
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 3.0) == QueueForecast(NOW + 3.5, 2)
    assert forecast_queue(view, NOW, NOW + 4.0, NOW + 9.0, 0.5) == QueueForecast(NOW + 4.5, 0)


def test_finished_work_delays_nothing_and_late_work_takes_half_of_the_time() -> None:
    view = prefill("p", (1.0, 0.5), (3.0, 1.0))
    later = NOW + 0.6
    assert forecast_queue(view, later, later, NOW + 9.0, 0.5) == QueueForecast(NOW + 2.0, 0)
    view.queue = [QueuedPrefill(NOW + 0.4, 0.5), QueuedPrefill(NOW + 3.0, 1.0)]
    assert forecast_queue(view, NOW, NOW, NOW + 9.0, 0.5) == QueueForecast(NOW + 2.0, 0)
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 0.25) == QueueForecast(NOW + 0.5, 0)
    view.queue[0] = QueuedPrefill(NOW + 0.4, 9.0)
    assert forecast_queue(view, NOW, NOW, NOW + 9.0, 0.5) == QueueForecast(NOW + 3.0, 0)
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 0.75) == QueueForecast(NOW + 1.5, 1)


# -- conditional disaggregation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "cached", "batch", "queued", "reads_itself"),
    [
        # 4 tokens take 40 ms to compute and 4 ms to transfer: local prefill if no decode has to
        # wait.
        (4, 0, 0, 0.0, True),
        (4, 0, 1, 0.0, False),
        # Other decodes wait 40 ms twice, but the request itself waits longer at the prefill worker.
        (4, 0, 1, 0.1, True),
        # 6 tokens take longer than the inter-token latency SLO.
        (6, 0, 0, 0.9, False),
        (133, 8, 0, 0.0, True),
        (133, 7, 0, 0.0, False),
    ],
)
def test_prompt_is_prefilled_on_the_decode_worker_when_cheaper_there(
    num_tokens: int, cached: int, batch: int, queued: float, reads_itself: bool
) -> None:
    busy = ((1.0, queued),) if queued else ()
    writer = decode("d", num_requests=batch, prefill_cost=PREFILL)
    cache = FakeCache({"d": cached, "p": cached})
    cluster = snapshot([prefill("p", *busy)], [writer], cache)
    placement_query = query(num_tokens=num_tokens, itl_slo_seconds=0.055, must_admit=True)
    decision = place(cluster, placement_query, CONFIG)
    assert (decision.prefill is None, decision.decode) == (reads_itself, "d")
    assert len(decision.prefill_scores) == len(decision.decode_scores) == 1


def test_decode_worker_without_prefill_cost_does_no_local_prefill() -> None:
    cluster = snapshot([prefill("p")], [decode("d")])
    assert place(cluster, query(num_tokens=1), CONFIG).prefill == "p"
