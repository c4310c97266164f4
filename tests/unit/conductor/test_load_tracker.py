"""Tests the load tracker: a worker's load is its last report plus the requests that were dispatched
to it since."""

import math
from dataclasses import replace

import pytest

from baton.core.cost import DecodeCost
from baton.core.ids import WorkerId
from conductor import load_tracker
from conductor.admission_rates import EWMA_WEIGHT, REFRESH_REQUESTS, AdmissionTracker
from conductor.limits import MAX_ADVANCED_WORKERS, MAX_UNREPORTED
from conductor.load_tracker import (
    LATE_MARGIN_STEP,
    MAX_QUEUE_ENTRIES,
    MIN_ADVANCE_SECONDS,
    DecodeLoadReport,
    LoadTracker,
    MixedLoadReport,
    PrefillLoadReport,
)
from conductor.policy.config import MAX_LATE_MARGIN
from conductor.policy.decision import Decision
from conductor.policy.queue_forecast import forecast_queue
from conductor.policy.snapshot import AdmissionRates, DecodeView, PrefillView, QueuedPrefill
from tests.cluster_snapshots import decode, mixed, prefill, query

P, D = WorkerId("p"), WorkerId("d")
PAIR = Decision(P, D, "", service_seconds=0.5)


def new_tracker() -> LoadTracker:
    tracker = LoadTracker()
    tracker.add(prefill("p"))
    tracker.add(decode("d"))
    return tracker


def report(at: float, *queue: QueuedPrefill, num_requests: int = 0) -> PrefillLoadReport:
    return PrefillLoadReport(at, 0.25, queue, num_requests, 10 * num_requests)


def test_dispatched_request_is_added() -> None:
    tracker = new_tracker()
    tracker.record_dispatch(10.0, query(), PAIR, 100.0)
    view, other = tracker.prefills[P], tracker.decodes[D]
    # The prompt is due in 2 s plus its own service time.
    assert view.queue == [QueuedPrefill(pytest.approx(13.33), 0.5)]
    assert (view.busy_until_seconds, view.free_at_seconds) == (10.0, 10.5)
    assert (view.num_requests, view.queued_tokens) == (1, 133)
    assert (other.num_requests, other.context_tokens, other.projected_tokens) == (1, 133, 233)
    tracker.record_dispatch(10.1, replace(query(), max_new_tokens=7), PAIR, 100.0)
    assert tracker.decodes[D].projected_tokens == 233 + 140
    assert tracker.prefills[P].free_at_seconds == 11.0


def test_late_first_tokens_raise_the_margin_and_others_lower_it() -> None:
    """A late first token is worth 19 in time: the margin stays while one in twenty is late."""
    tracker = new_tracker()
    tracker.add(mixed("m"))

    def margins(at: float, num: int, num_late: int) -> tuple[float, float]:
        counted = replace(report(at), num_first_tokens=num, num_late_first_tokens=num_late)
        answers = DecodeLoadReport(at, 0, 0, 0)
        tracker.apply_report(P, counted)
        tracker.apply_report(WorkerId("m"), MixedLoadReport(counted, answers, 1.0, 0.0))
        return tracker.prefills[P].late_margin, tracker.mixed[WorkerId("m")].prefill.late_margin

    step = LATE_MARGIN_STEP
    assert margins(1.0, 100, 100) == (0.0, 0.0)  # the first report says nothing of the time since
    assert margins(2.0, 102, 102) == (pytest.approx(1.9 * step),) * 2
    assert margins(3.0, 102, 102) == (pytest.approx(1.9 * step),) * 2
    assert margins(4.0, 122, 103) == (pytest.approx(1.9 * step),) * 2
    assert margins(5.0, 142, 103) == (pytest.approx(0.9 * step),) * 2
    assert margins(6.0, 300, 103) == (0.0, 0.0)
    assert margins(7.0, 1300, 1103) == (MAX_LATE_MARGIN,) * 2
    assert margins(8.0, 0, 0) == (MAX_LATE_MARGIN,) * 2
    tracker.remove(P)
    tracker.add(prefill("p"))
    assert margins(9.0, 50, 50)[0] == 0.0


def test_finished_work_leaves_the_queue() -> None:
    tracker = new_tracker()
    tracker.record_dispatch(10.0, query(), PAIR, 100.0)
    tracker.record_dispatch(10.1, query(), PAIR, 100.0)
    tracker.record_dispatch(10.6, query(), PAIR, 100.0)
    view = tracker.prefills[P]
    # The first prompt is done, and so is a tenth of a second of the second one.
    assert [due.work_seconds for due in view.queue] == pytest.approx([0.4, 0.5])
    assert (view.busy_until_seconds, view.free_at_seconds) == (10.6, 11.5)
    tracker.record_dispatch(30.0, query(), PAIR, 100.0)
    assert (view.busy_until_seconds, len(view.queue)) == (30.0, 1)
    assert view.free_at_seconds == 30.5


def test_report_replaces_requests_dispatched_before_it() -> None:
    tracker = new_tracker()
    for at in (10.0, 11.0, 12.0):
        tracker.record_dispatch(at, query(), PAIR, 100.0)
    tracker.apply_report(P, report(11.0, QueuedPrefill(20.0, 2.0), num_requests=1))
    view = tracker.prefills[P]
    # The last request was dispatched after the report.
    assert view.queue == [QueuedPrefill(pytest.approx(15.33), 0.5), QueuedPrefill(20.0, 1.25)]
    assert (view.busy_until_seconds, view.free_at_seconds) == (12.0, 13.75)
    assert (view.num_requests, view.queued_tokens) == (2, 10 + 133)
    tracker.apply_report(D, DecodeLoadReport(11.0, 4, 400, 800))
    other = tracker.decodes[D]
    assert (other.num_requests, other.context_tokens, other.projected_tokens) == (5, 533, 1033)
    tracker.apply_report(P, report(12.0))
    assert (tracker.prefills[P].queue, tracker.prefills[P].num_requests) == ([], 0)


def test_report_updates_cost_and_capacity() -> None:
    tracker = LoadTracker()
    tracker.add(DecodeView(D, DecodeCost(1.0, 0.0, 0.0), 10, is_measured=False))
    tracker.apply_report(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert not tracker.decodes[D].is_measured
    writes = DecodeCost(2.0, 0.0, 0.0)
    tracker.apply_report(D, DecodeLoadReport(2.0, 0, 0, 5, writes, 20))
    assert (tracker.decodes[D].cost, tracker.decodes[D].is_measured) == (writes, True)
    assert tracker.decodes[D].load == 5 / 20


def test_workers_are_ordered_by_load() -> None:
    tracker = new_tracker()
    for name in ("q", "r"):
        tracker.add(prefill(name))
        tracker.add(decode(f"d{name}"))
    tracker.record_dispatch(1.0, query(), replace(PAIR, prefill=WorkerId("q")), 100.0)
    tracker.record_dispatch(1.0, query(), replace(PAIR, service_seconds=9.0), 100.0)
    assert [view.id for view in tracker.prefills.by_load()] == ["r", "q", "p"]
    assert [view.id for view in tracker.decodes.by_load()] == ["dq", "dr", "d"]
    tracker.apply_report(P, report(1.0))
    tracker.apply_report(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert [view.id for view in tracker.prefills.by_load()] == ["r", "p", "q"]
    assert [view.id for view in tracker.decodes.by_load()] == ["d", "dq", "dr"]


def test_answers_are_assumed_to_end_between_reports() -> None:
    tracker = new_tracker()
    tracker.apply_report(D, DecodeLoadReport(0.0, 10, 500, 1000))
    tracker.advance(MIN_ADVANCE_SECONDS / 2, 100.0)
    assert tracker.decodes[D].projected_tokens == 1000
    # Ten requests take a hundred steps of 20 ms: a quarter of them ends within 0.5 s.
    tracker.advance(0.5, 100.0)
    assert (tracker.decodes[D].projected_tokens, tracker.decodes[D].context_tokens) == (750, 375)
    tracker.advance(1000.0, 100.0)
    assert tracker.decodes[D].projected_tokens == 0


def test_fresh_report_is_not_aged() -> None:
    tracker = new_tracker()
    tracker.apply_report(D, DecodeLoadReport(10.0, 10, 500, 1000))
    tracker.advance(10.5, 100.0)
    assert tracker.decodes[D].projected_tokens == 750
    tracker.apply_report(D, DecodeLoadReport(10.9, 10, 500, 1000))
    tracker.advance(10.9, 100.0)
    assert tracker.decodes[D].projected_tokens == 1000


def test_request_just_sent_to_an_idle_worker_is_not_aged() -> None:
    tracker = new_tracker()
    tracker.record_dispatch(1000.0, query(), PAIR, 100.0)
    tracker.advance(1000.0, 100.0)
    assert tracker.decodes[D].projected_tokens == 233


def test_request_on_a_single_worker_counts_once() -> None:
    tracker = new_tracker()
    tracker.record_dispatch(1.0, query(), Decision(None, P, "", service_seconds=0.5), 100.0)
    assert (tracker.prefills[P].num_requests, tracker.decodes[D].num_requests) == (1, 0)
    tracker.record_dispatch(1.0, query(), Decision(None, D, ""), 100.0)
    assert (tracker.prefills[P].num_requests, tracker.decodes[D].num_requests) == (1, 1)


def test_other_conductors_are_assumed_to_dispatch_as_much() -> None:
    tracker = LoadTracker(3)
    tracker.add(prefill("p"))
    tracker.record_dispatch(10.0, query(), PAIR, 100.0)
    assert tracker.prefills[P].free_at_seconds == 11.5
    tracker.apply_report(P, report(9.0))
    assert tracker.prefills[P].free_at_seconds == 11.5
    tracker.apply_report(P, report(10.0, num_requests=1))
    assert tracker.prefills[P].free_at_seconds == 10.25


def test_removed_worker_is_ignored() -> None:
    tracker = new_tracker()
    tracker.remove(P)
    tracker.remove(D)
    tracker.remove(P)
    tracker.record_dispatch(1.0, query(), PAIR, 100.0)
    tracker.apply_report(P, report(1.0))
    tracker.apply_report(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert (len(tracker.prefills), len(tracker.decodes)) == (0, 0)
    tracker.add(prefill("p"))
    assert tracker.prefills[P].num_requests == 0


def test_unreported_requests_are_bounded() -> None:
    tracker = new_tracker()
    placement_query = query(num_tokens=1, ttft_slo_seconds=math.inf)
    for _ in range(MAX_UNREPORTED + 5):
        tracker.record_dispatch(1.0, placement_query, replace(PAIR, service_seconds=0.0), 0.0)
    tracker.apply_report(D, DecodeLoadReport(0.0, 0, 0, 0))
    assert tracker.decodes[D].num_requests == MAX_UNREPORTED


def test_queue_of_an_overloaded_worker_that_does_not_report_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 200 s, a worker is sent twice as many prompts as it can compute: 50 a second, each of
    which takes 40 ms."""
    bounded = overloaded_view()
    assert len(bounded.queue) == MAX_QUEUE_ENTRIES
    monkeypatch.setattr(load_tracker, "MAX_QUEUE_ENTRIES", 100_000)
    unbounded = overloaded_view()
    assert len(unbounded.queue) == 5001
    # The first 4,746 prompts that are left have become one.
    assert bounded.queue[1:] == unbounded.queue[-255:]
    assert bounded.queue[0] == QueuedPrefill(
        unbounded.queue[-256].deadline_seconds, pytest.approx(4746 * 0.04)
    )
    assert (bounded.busy_until_seconds, bounded.num_requests) == (200.0, 10_001)
    assert bounded.free_at_seconds == unbounded.free_at_seconds == pytest.approx(10_001 * 0.04)
    # The last 165 prompts can be in time. They get half of each step, and late ones the other half.
    for deadline, num_before in ((203.4, 165), (202.0, 98)):
        forecasts = [
            forecast_queue(view, 200.0, 200.0, deadline, 0.04) for view in (bounded, unbounded)
        ]
        assert forecasts[0] == forecasts[1]
        assert forecasts[0].done_seconds == pytest.approx(200.0 + 2 * 0.04 * (num_before + 1))


def overloaded_view() -> PrefillView:
    tracker = new_tracker()
    for number in range(10_001):
        tracker.record_dispatch(number / 50, query(), replace(PAIR, service_seconds=0.04), 100.0)
    return tracker.prefills[P]


# -- admissions ----------------------------------------------------------------------------


def test_initially_no_prompt_length_has_an_advantage() -> None:
    admissions = AdmissionTracker()
    assert admissions.view == AdmissionRates()
    assert admissions.view.advantage(1_000_000) == 0.0


def test_admission_shares_are_tracked_by_length_quartile() -> None:
    admissions = AdmissionTracker()
    for number in range(REFRESH_REQUESTS):
        admissions.record(number, admitted=True)
    view = admissions.view
    assert view.edges_tokens == (15, 31, 47)
    assert view.admitted_shares == (1.0,) * 4
    assert view.large_tokens == 62
    admissions.record(48, admitted=False)
    view = admissions.view
    assert view.admitted_shares == (1.0, 1.0, 1.0, 1 - EWMA_WEIGHT)
    assert view.advantage(47) == pytest.approx(EWMA_WEIGHT)
    assert view.advantage(48) == 0.0
    admissions.record(48, admitted=True)
    assert admissions.view.admitted_shares[3] == pytest.approx(1 - EWMA_WEIGHT + EWMA_WEIGHT**2)


def test_first_quartiles_all_begin_with_the_share_of_all_requests() -> None:
    admissions = AdmissionTracker()
    for number in range(REFRESH_REQUESTS):
        admissions.record(number, admitted=number != 10)
    assert admissions.view.advantage(1) == 0.0
    share = admissions.view.admitted_shares[0]
    assert share == pytest.approx(1 - EWMA_WEIGHT * (1 - EWMA_WEIGHT) ** (REFRESH_REQUESTS - 11))


def test_length_quartiles_follow_the_traffic() -> None:
    admissions = AdmissionTracker()
    for _ in range(REFRESH_REQUESTS):
        admissions.record(100, admitted=True)
    assert admissions.view.edges_tokens == (100, 100, 100)
    for _ in range(20 * REFRESH_REQUESTS):
        admissions.record(1000, admitted=True)
    assert admissions.view.edges_tokens == (1000, 1000, 1000)


def test_answers_of_a_large_pool_are_advanced_in_several_calls() -> None:
    """Of twice as many workers as one call advances, the second half follows in the next call, and
    the call after that has nothing to do."""
    tracker = LoadTracker()
    workers = [WorkerId(f"d{number:03}") for number in range(2 * MAX_ADVANCED_WORKERS)]
    for worker in workers:
        tracker.add(decode(worker))
        tracker.record_dispatch(10.0, query(), Decision(None, worker, ""), 100.0)
    loads = [233 * len(workers)]
    for now in (1000.0, 1000.01, 1000.02):
        tracker.advance(now, 100.0)
        loads.append(sum(view.projected_tokens for view in tracker.decodes))
    assert loads == [233 * len(workers), 233 * MAX_ADVANCED_WORKERS, 0, 0]
    assert [view.id for view in tracker.decodes.by_load()] == workers
    tracker.remove(workers[0])
    tracker.advance(2000.0, 100.0)  # also when a worker that is still to be advanced is gone
    tracker.remove(workers[-1])
    tracker.advance(2000.0, 100.0)
