"""Baton's placement: pure, with exact scores."""

import math
from dataclasses import replace

import pytest

from baton.core.ids import WorkerId
from baton.errors import Invalid, Overloaded, Unavailable
from baton.hash_ring import ring_successors
from conductor.policy.baton import SLO_MISS_PENALTY, BatonPolicyConfig, place
from conductor.policy.candidates import candidates, hash_to_index, ring_key
from conductor.policy.decision import ScoredWorker
from conductor.policy.prefill_work import PrefillWork, prefill_work
from conductor.policy.queue_forecast import QueueForecast, forecast_queue
from conductor.policy.snapshot import AdmissionRates, QueuedPrefill, StoredPrefix
from tests.fleet import CHAIN, NOW, PREFILL, FakeCache, decode, prefill, query, snapshot

CONFIG = BatonPolicyConfig()
W = CONFIG.service_weight
OWN = 1.33
"""Seconds that the request takes an idle worker with an empty cache."""


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
def test_the_ring_key_is_the_first_that_few_share(
    num_workers: int, shares: list[float], depth: int
) -> None:
    workers = [prefill(f"p{number}") for number in range(num_workers)]
    assert ring_key(snapshot(workers, [], FakeCache(shares=shares)), query()) == CHAIN[depth]


def test_the_ring_key_of_what_everybody_asks_is_the_session_or_the_request() -> None:
    seen = snapshot([prefill("p")], [], FakeCache(shares=[1.0] * 8))
    assert ring_key(seen, query("mine")) == b"mine"
    assert ring_key(seen, query("mine", session="talk")) == b"talk"
    assert ring_key(seen, replace(query("mine"), keys=())) == b"mine"


def test_candidates_are_the_ring_the_holders_and_one_of_the_least_loaded() -> None:
    names = tuple(f"p{number:02}" for number in range(12))
    ring = list(ring_successors(names, CHAIN[0]))
    cached = {ring[5]: 1, ring[6]: 3, ring[7]: 2, "stranger": 9}
    idle = sorted(ring[8:])
    workers = [prefill(n) if n in idle else prefill(n, (9.0, 1.0)) for n in names]
    seen = snapshot(workers, [], FakeCache(cached))
    for number in range(8):
        asked = query(f"r{number}")
        least = idle[hash_to_index(asked.request_id, 4)]
        found = [view.id for view in candidates(seen, asked, 3, 3, 4)]
        assert found == [*ring[:3], ring[6], ring[7], least]
    picks = {hash_to_index(f"r{number}", 4) for number in range(32)}
    assert picks == {0, 1, 2, 3}
    narrow = [view.id for view in candidates(seen, query(), 1, 0, 1)]
    assert narrow == [ring[0], idle[0]]
    without = query(**excluding(ring[0], ring[6], idle[0]))
    assert [view.id for view in candidates(seen, without, 1, 2, 1)] == [ring[1], idle[1]]


# -- prefill -------------------------------------------------------------------------------


def test_prefill_scores_are_queue_and_weighted_service() -> None:
    workers = [prefill("p0", (9.0, 0.2)), prefill("p1"), prefill("p2", (9.0, 0.1))]
    decision = place(
        snapshot(workers, [decode("d")], FakeCache({"p0": 2, "p1": 8})), query(), CONFIG
    )
    # 133 tokens, of which 128 are in p1's cache and 32 in p0's.
    assert [each.worker for each in decision.prefill_scores] == ["p1", "p0", "p2"]
    assert [each.score for each in decision.prefill_scores] == pytest.approx(
        [W * 0.05, 0.2 + W * 1.01, 0.1 + W * OWN]
    )
    assert [each.local_blocks for each in decision.prefill_scores] == [8, 2, 0]
    assert (decision.prefill, decision.decode) == ("p1", "d")
    assert decision.service_seconds == pytest.approx(0.05)
    assert decision.ttft_seconds == pytest.approx(0.05)
    assert decision.tbt_seconds == pytest.approx(0.011)
    assert decision.reason == (
        "8 of 8 blocks at hand, 0 to fetch, starts in 0.000 s, computes 0.050 s, best of 3"
    )
    light = replace(CONFIG, service_weight=0.0)
    by_queue = place(snapshot(workers, [decode("d")], FakeCache({"p0": 8})), query(), light)
    assert [each.worker for each in by_queue.prefill_scores] == ["p1", "p2", "p0"]


def test_the_last_token_is_never_cached() -> None:
    seen = snapshot([prefill("p")], [decode("d")], FakeCache({"p": 8}))
    [scored] = place(seen, query("r", 128), CONFIG).prefill_scores
    assert scored == ScoredWorker(
        WorkerId("p"), pytest.approx(W * 0.01), 0.0, pytest.approx(0.01), 8
    )


def test_what_is_worth_its_way_is_fetched() -> None:
    cache = FakeCache({"p": 2}, StoredPrefix("s", 8))
    seen = snapshot([prefill("p")], [decode("d")], cache)
    work = prefill_work(seen, query(), seen.prefills["p"], cache.held)
    # 96 tokens in 0.096 s instead of 0.96 s.
    assert work == PrefillWork(pytest.approx(0.05), 2, 6, pytest.approx(0.096))
    decision = place(seen, query(), CONFIG)
    assert decision.reuse == StoredPrefix("s", 8)
    assert decision.prefill_scores[0].fetched_blocks == 6
    assert decision.ttft_seconds == pytest.approx(0.146)
    slow = replace(seen, kv_bytes_per_token=20_000)
    assert prefill_work(slow, query(), seen.prefills["p"], cache.held) == PrefillWork(
        pytest.approx(1.01), 2
    )
    assert place(slow, query(), CONFIG).reuse is None


def test_who_would_be_late_comes_after_who_would_not() -> None:
    # Due in 2 s + 1.33 s, planned 0.3 s earlier; behind 2 s of work it is 0.3 s late.
    workers = [prefill("p0", (2.5, 2.0)), prefill("p1", (9.0, 3.0))]
    decision = place(snapshot(workers, [decode("d")], FakeCache({"p1": 1})), query(), CONFIG)
    first, second = decision.prefill_scores
    assert (first.worker, first.late_seconds) == ("p1", 0.0)
    # What is due later waits for it, and is in time all the same.
    assert first.queue_seconds == 0.0
    assert second.late_seconds == pytest.approx(0.3)
    assert second.score == pytest.approx(SLO_MISS_PENALTY + 2.0 + W * OWN)


def test_who_would_make_others_late_comes_last() -> None:
    workers = [prefill("p0", (3.2, 2.0)), prefill("p1", (9.0, 2.0))]
    asked = query(first_token_seconds=1.0)
    decision = place(snapshot(workers, [decode("d")]), asked, CONFIG)
    assert [each.worker for each in decision.prefill_scores] == ["p1", "p0"]
    assert [each.score for each in decision.prefill_scores] == pytest.approx(
        [2.0 + W * OWN, SLO_MISS_PENALTY + 2.0 + W * OWN]
    )
    alone = snapshot(workers[:1], [decode("d")])
    with pytest.raises(Overloaded, match="requests that were let in before would be late"):
        place(alone, asked, CONFIG)


def test_of_equals_the_first_on_the_ring_is_taken() -> None:
    names = tuple(f"{number}" for number in range(6))
    for number in range(20):
        asked = query(f"request {number}")
        asked = replace(asked, keys=(bytes([number]) * 16,))
        seen = snapshot([prefill(n) for n in names], [decode(n) for n in names])
        decision = place(seen, asked, CONFIG)
        assert decision.prefill == next(ring_successors(names, asked.keys[0]))
        assert decision.decode == next(ring_successors(names, asked.request_id.encode()))


def test_the_order_of_the_views_does_not_matter() -> None:
    workers = [prefill(f"p{number}", (9.0, number % 3 + 0.1)) for number in range(7)]
    others = [decode(f"d{number}", 100 * (number % 2)) for number in range(5)]
    for number in range(20):
        asked = query(f"request {number}")
        cache = FakeCache({"p3": 1})
        turned = snapshot(workers[::-1], others[::-1], cache)
        assert place(turned, asked, CONFIG) == place(
            snapshot(workers, others, cache), asked, CONFIG
        )


def test_a_full_scan_scores_everybody() -> None:
    workers = [prefill(f"p{number}", (50.0, 20.0 - number)) for number in range(20)]
    seen = snapshot(workers, [decode("d")])
    asked = query(first_token_seconds=60.0, **excluding("p19"))
    decision = place(seen, asked, replace(CONFIG, full_scan=True))
    assert decision.prefill == "p18" and len(decision.prefill_scores) == 19
    assert len(place(seen, asked, CONFIG).prefill_scores) <= 4


# -- decode --------------------------------------------------------------------------------


def test_the_least_promised_decodes() -> None:
    others = [decode("d0", 4000), decode("d1", 1000), decode("d2", 1000, 2000)]
    scores = place(snapshot([prefill("p")], others), query(), CONFIG).decode_scores
    # 133 tokens and an answer of 100 are needed.
    assert [each.worker for each in scores] == ["d1", "d0", "d2"]
    assert [each.score for each in scores] == pytest.approx([0.1233, 0.4233, 0.6165])
    assert [each.service_seconds for each in scores] == pytest.approx([0.012] * 3)


def test_who_would_be_too_slow_comes_last() -> None:
    others = [decode("d0", 4000), decode("d1", 1000, num_requests=40)]
    scores = place(snapshot([prefill("p")], others), query(), CONFIG).decode_scores
    assert [each.worker for each in scores] == ["d0", "d1"]
    assert scores[1].score == pytest.approx(SLO_MISS_PENALTY + 0.1233)
    assert scores[1].late_seconds == pytest.approx(0.001)


def test_who_could_never_hold_it_is_not_asked() -> None:
    others = [decode("d0", 0, 100), decode("d1", 5000)]
    decision = place(snapshot([prefill("p")], others), query(), CONFIG)
    assert [each.worker for each in decision.decode_scores] == ["d1"]


# -- refusals ------------------------------------------------------------------------------


def test_without_memory_it_is_refused_unless_promised() -> None:
    full = decode("d", 9900, num_requests=9)
    seen = snapshot([prefill("p")], [full])
    # 133 more tokens than there are get free within 133 / 9900 of an answer's 1.9 s. With 31 ms to
    # spare for each of 16 tokens, even a short answer makes up for that.
    patient = query(token_gap_seconds=0.05)
    assert place(seen, patient, CONFIG).decode == "d"
    hasty = query(token_gap_seconds=0.02)
    with pytest.raises(Overloaded, match="room for 100 tokens, and 233 are needed") as refusal:
        place(replace(seen, short_answer_tokens=0.0), hasty, CONFIG)
    assert refusal.value.retry_after_seconds == 0.1
    for let_in in (replace(CONFIG, admission=False), CONFIG):
        asked = replace(hasty, promised=let_in.admission)
        assert place(seen, asked, let_in).decode == "d"


def test_an_idle_worker_refuses_nothing_that_it_can_hold() -> None:
    seen = snapshot([prefill("p")], [decode("d", 0, 140)])
    assert place(seen, query(first_token_seconds=1e-6, token_gap_seconds=1e-6), CONFIG)


def test_what_would_be_late_is_refused_with_the_time_to_wait() -> None:
    seen = snapshot([prefill("p", (2.5, 2.0))], [decode("d")])
    with pytest.raises(Overloaded, match=r"would come 0\.30 s late") as refusal:
        place(seen, query(), CONFIG)
    assert refusal.value.retry_after_seconds == pytest.approx(0.3)
    assert place(seen, query(promised=True), CONFIG).prefill == "p"
    assert place(seen, query(first_token_seconds=math.inf), CONFIG).prefill == "p"


def test_tokens_that_would_come_too_slowly_are_refused() -> None:
    seen = snapshot([prefill("p")], [decode("d", 1000, num_requests=40)])
    with pytest.raises(Overloaded, match=r"every 0\.051 s, which is more than 0\.050 s"):
        place(seen, query(), CONFIG)


def test_nobody_is_refused_for_a_guess() -> None:
    guessed = prefill("p", (2.5, 2.0), measured=False)
    slow = decode("d", 1000, num_requests=40, measured=False)
    decision = place(snapshot([guessed], [slow]), query(), CONFIG)
    assert (decision.prefill, decision.decode) == ("p", "d")
    assert decision.prefill_scores[0].score == pytest.approx(2.0 + W * OWN)
    assert decision.prefill_scores[0].late_seconds == 0.0


def test_short_prompts_leave_room_for_a_long_one() -> None:
    unfair = AdmissionRates((100, 200, 300), (1.0, 1.0, 1.0, 0.9), large_tokens=500)
    nearly_full = decode("d", 9400, num_requests=9)
    seen = snapshot([prefill("p")], [nearly_full], admitted=unfair)
    seen = replace(seen, short_answer_tokens=0.0)
    with pytest.raises(Overloaded, match="keeps its last 500 tokens for a longer prompt"):
        place(seen, query("short", 133), CONFIG)
    assert place(seen, query("long", 301), CONFIG).decode == "d"
    fair = replace(seen, admitted=replace(unfair, shares=(1.0, 1.0, 1.0, 0.99)))
    assert place(fair, query("short", 133), CONFIG).decode == "d"


def test_what_nobody_can_ever_hold_is_the_callers_mistake() -> None:
    others = [decode("d0", 0, 100), decode("d1", 0, 132)]
    for asked in (query(), query(promised=True), query(**excluding("d1"))):
        with pytest.raises(Invalid, match=r"has 133 tokens, and the largest .* for 132"):
            place(snapshot([prefill("p")], others), asked, CONFIG)


def test_pools_that_are_empty_or_failed() -> None:
    workers, others = [prefill("p0"), prefill("p1", (9.0, 1.0))], [decode("d0"), decode("d1", 99)]
    seen = snapshot(workers, others, FakeCache({"p0": 8}, StoredPrefix("s", 4)))
    decision = place(seen, query(**excluding("p0", "d0")), CONFIG)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    alone = place(seen, query(**excluding("p0", "p1", "d0")), CONFIG)
    assert (alone.prefill, alone.decode, alone.reason) == (None, "d1", "no prefill worker is ready")
    assert (alone.tbt_seconds, alone.reuse) == (pytest.approx(0.012), StoredPrefix("s", 4))
    reader = place(seen, query(**excluding("d0", "d1")), CONFIG)
    assert (reader.prefill, reader.decode) == (None, "p0")
    assert reader.reason == "no decode worker is ready"
    assert (reader.service_seconds, reader.ttft_seconds) == (pytest.approx(0.05),) * 2
    for nobody in (snapshot([], []), seen):
        with pytest.raises(Unavailable, match="no worker is ready"):
            place(nobody, query(**excluding("p0", "p1", "d0", "d1")), CONFIG)


# -- outlook -------------------------------------------------------------------------------


def test_the_outlook_is_by_deadline() -> None:
    view = prefill("p", (1.0, 0.5), (3.0, 1.0), (5.0, 1.0))
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 0.5) == QueueForecast(NOW + 1.0, 0)
    assert forecast_queue(view, NOW, NOW, NOW + 9.0, 0.5) == QueueForecast(NOW + 3.0, 0)
    # Before the second, which then ends at 4.0 s, and the third, at 5.0 s.
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 2.0) == QueueForecast(NOW + 2.5, 1)
    assert forecast_queue(view, NOW, NOW, NOW + 2.0, 3.0) == QueueForecast(NOW + 3.5, 2)
    assert forecast_queue(view, NOW, NOW + 4.0, NOW + 9.0, 0.5) == QueueForecast(NOW + 4.5, 0)


def test_what_is_done_or_lost_holds_nobody_up() -> None:
    view = prefill("p", (1.0, 0.5), (3.0, 1.0))
    later = NOW + 0.6
    assert forecast_queue(view, later, later, NOW + 9.0, 0.5) == QueueForecast(NOW + 2.0, 0)
    view.queue = [QueuedPrefill(NOW + 0.4, 0.5), QueuedPrefill(NOW + 3.0, 1.0)]
    assert forecast_queue(view, NOW, NOW, NOW + 9.0, 0.5) == QueueForecast(NOW + 1.5, 0)


# -- conditional disaggregation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "cached", "batch", "queued", "reads_itself"),
    [
        # 4 tokens take 40 ms and travel in 4 ms: itself, if nobody has to wait for that.
        (4, 0, 0, 0.0, True),
        (4, 0, 1, 0.0, False),
        # Others wait twice 40 ms, the request itself more than that at the prefill worker.
        (4, 0, 1, 0.1, True),
        # 6 tokens take longer than the gap between two tokens may be.
        (6, 0, 0, 0.9, False),
        (133, 8, 0, 0.0, True),
        (133, 7, 0, 0.0, False),
    ],
)
def test_a_decode_worker_reads_what_is_cheaper_there(
    num_tokens: int, cached: int, batch: int, queued: float, reads_itself: bool
) -> None:
    busy = ((1.0, queued),) if queued else ()
    writer = decode("d", num_requests=batch, prefill_cost=PREFILL)
    cache = FakeCache({"d": cached, "p": cached})
    seen = snapshot([prefill("p", *busy)], [writer], cache)
    asked = query(num_tokens=num_tokens, token_gap_seconds=0.055, promised=True)
    decision = place(seen, asked, CONFIG)
    assert (decision.prefill is None, decision.decode) == (reads_itself, "d")
    assert len(decision.prefill_scores) == len(decision.decode_scores) == 1


def test_who_may_not_read_does_not() -> None:
    seen = snapshot([prefill("p")], [decode("d")])
    assert place(seen, query(num_tokens=1), CONFIG).prefill == "p"
