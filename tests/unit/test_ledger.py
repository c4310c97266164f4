"""What is believed of workers: their last report, and what was sent since."""

import math
from dataclasses import replace

import pytest

from baton.core.cost import DecodeCost
from baton.core.ids import WorkerId
from conductor.admission_rates import EWMA_WEIGHT, REFRESH_REQUESTS, AdmissionTracker
from conductor.load_tracker import (
    ADVANCE_SECONDS,
    MAX_UNREPORTED,
    DecodeLoadReport,
    LoadTracker,
    PrefillLoadReport,
)
from conductor.policy.decision import Decision
from conductor.policy.snapshot import AdmissionRates, DecodeView, QueuedPrefill
from tests.fleet import decode, prefill, query

P, D = WorkerId("p"), WorkerId("d")
PAIR = Decision(P, D, "", service_seconds=0.5)


def ledger() -> LoadTracker:
    made = LoadTracker()
    made.add_prefill(prefill("p"))
    made.add_decode(decode("d"))
    return made


def report(at: float, *queue: QueuedPrefill, num_requests: int = 0) -> PrefillLoadReport:
    return PrefillLoadReport(at, 0.25, queue, num_requests, 10 * num_requests)


def test_what_was_sent_is_added() -> None:
    made = ledger()
    made.dispatched(10.0, query(), PAIR, 100.0)
    view, other = made.prefills[P], made.decodes[D]
    # Due in 2 s, and in what the prompt takes by itself.
    assert view.queue == [QueuedPrefill(pytest.approx(13.33), 0.5)]
    assert (view.busy_until_seconds, view.free_at_seconds) == (10.0, 10.5)
    assert (view.num_requests, view.queued_tokens) == (1, 133)
    assert (other.num_requests, other.context_tokens, other.promised_tokens) == (1, 133, 233)
    made.dispatched(10.1, replace(query(), max_new_tokens=7), PAIR, 100.0)
    assert made.decodes[D].promised_tokens == 233 + 140
    assert made.prefills[P].free_at_seconds == 11.0


def test_what_must_be_done_leaves_the_queue() -> None:
    made = ledger()
    made.dispatched(10.0, query(), PAIR, 100.0)
    made.dispatched(10.1, query(), PAIR, 100.0)
    made.dispatched(10.6, query(), PAIR, 100.0)
    view = made.prefills[P]
    # The first is done, and a tenth of a second of the next.
    assert [due.work_seconds for due in view.queue] == pytest.approx([0.4, 0.5])
    assert (view.busy_until_seconds, view.free_at_seconds) == (10.6, 11.5)
    made.dispatched(30.0, query(), PAIR, 100.0)
    assert (view.busy_until_seconds, len(view.queue)) == (30.0, 1)
    assert view.free_at_seconds == 30.5


def test_a_report_replaces_what_it_contains() -> None:
    made = ledger()
    for at in (10.0, 11.0, 12.0):
        made.dispatched(at, query(), PAIR, 100.0)
    made.report_prefill(P, report(11.0, QueuedPrefill(20.0, 2.0), num_requests=1))
    view = made.prefills[P]
    # The last one was sent after the report.
    assert view.queue == [QueuedPrefill(pytest.approx(15.33), 0.5), QueuedPrefill(20.0, 1.25)]
    assert (view.busy_until_seconds, view.free_at_seconds) == (12.0, 13.75)
    assert (view.num_requests, view.queued_tokens) == (2, 10 + 133)
    made.report_decode(D, DecodeLoadReport(11.0, 4, 400, 800))
    other = made.decodes[D]
    assert (other.num_requests, other.context_tokens, other.promised_tokens) == (5, 533, 1033)
    made.report_prefill(P, report(12.0))
    assert (made.prefills[P].queue, made.prefills[P].num_requests) == ([], 0)


def test_a_report_tells_of_speed_and_room() -> None:
    made = LoadTracker()
    made.add_decode(DecodeView(D, DecodeCost(1.0, 0.0, 0.0), 10, measured=False))
    made.report_decode(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert not made.decodes[D].measured
    writes = DecodeCost(2.0, 0.0, 0.0)
    made.report_decode(D, DecodeLoadReport(2.0, 0, 0, 5, writes, 20))
    assert (made.decodes[D].cost, made.decodes[D].measured) == (writes, True)
    assert made.decodes[D].load == 5 / 20


def test_the_least_loaded_are_in_order() -> None:
    made = ledger()
    for name in ("q", "r"):
        made.add_prefill(prefill(name))
        made.add_decode(decode(f"d{name}"))
    made.dispatched(1.0, query(), replace(PAIR, prefill=WorkerId("q")), 100.0)
    made.dispatched(1.0, query(), replace(PAIR, service_seconds=9.0), 100.0)
    assert [view.id for view in made.prefills.least()] == ["r", "q", "p"]
    assert [view.id for view in made.decodes.least()] == ["dq", "dr", "d"]
    made.report_prefill(P, report(1.0))
    made.report_decode(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert [view.id for view in made.prefills.least()] == ["r", "p", "q"]
    assert [view.id for view in made.decodes.least()] == ["d", "dq", "dr"]


def test_between_reports_answers_end() -> None:
    made = ledger()
    made.report_decode(D, DecodeLoadReport(0.0, 10, 500, 1000))
    made.advance(ADVANCE_SECONDS / 2, 100.0)
    assert made.decodes[D].promised_tokens == 1000
    # Ten requests take 20 ms a step, and a hundred steps: in 0.5 s a quarter of them ends.
    made.advance(0.5, 100.0)
    assert (made.decodes[D].promised_tokens, made.decodes[D].context_tokens) == (750, 375)
    made.advance(1000.0, 100.0)
    assert made.decodes[D].promised_tokens == 0


def test_what_was_reported_just_now_has_not_ended_since() -> None:
    made = ledger()
    made.report_decode(D, DecodeLoadReport(10.0, 10, 500, 1000))
    made.advance(10.5, 100.0)
    assert made.decodes[D].promised_tokens == 750
    made.report_decode(D, DecodeLoadReport(10.9, 10, 500, 1000))
    made.advance(10.9, 100.0)
    assert made.decodes[D].promised_tokens == 1000


def test_what_an_idle_worker_was_just_sent_has_not_ended() -> None:
    made = ledger()
    made.dispatched(1000.0, query(), PAIR, 100.0)
    made.advance(1000.0, 100.0)
    assert made.decodes[D].promised_tokens == 233


def test_one_worker_that_does_it_all() -> None:
    made = ledger()
    made.dispatched(1.0, query(), Decision(None, P, "", service_seconds=0.5), 100.0)
    assert (made.prefills[P].num_requests, made.decodes[D].num_requests) == (1, 0)
    made.dispatched(1.0, query(), Decision(None, D, ""), 100.0)
    assert (made.prefills[P].num_requests, made.decodes[D].num_requests) == (1, 1)


def test_others_send_as_much() -> None:
    made = LoadTracker(3)
    made.add_prefill(prefill("p"))
    made.dispatched(10.0, query(), PAIR, 100.0)
    assert made.prefills[P].free_at_seconds == 11.5
    made.report_prefill(P, report(9.0))
    assert made.prefills[P].free_at_seconds == 11.5
    made.report_prefill(P, report(10.0, num_requests=1))
    assert made.prefills[P].free_at_seconds == 10.25


def test_who_is_gone_is_nobody() -> None:
    made = ledger()
    made.remove(P)
    made.remove(D)
    made.remove(P)
    made.dispatched(1.0, query(), PAIR, 100.0)
    made.report_prefill(P, report(1.0))
    made.report_decode(D, DecodeLoadReport(1.0, 0, 0, 0))
    assert (len(made.prefills), len(made.decodes)) == (0, 0)
    made.add_prefill(prefill("p"))
    assert made.prefills[P].num_requests == 0


def test_what_is_not_reported_is_bounded() -> None:
    made = ledger()
    asked = query(num_tokens=1, first_token_seconds=math.inf)
    for _ in range(MAX_UNREPORTED + 5):
        made.dispatched(1.0, asked, replace(PAIR, service_seconds=0.0), 0.0)
    made.report_decode(D, DecodeLoadReport(0.0, 0, 0, 0))
    assert made.decodes[D].num_requests == MAX_UNREPORTED


# -- admissions ----------------------------------------------------------------------------


def test_nobody_has_an_advantage_at_first() -> None:
    admissions = AdmissionTracker()
    assert admissions.view == AdmissionRates()
    assert admissions.view.advantage(1_000_000) == 0.0


def test_shares_are_by_quarters_of_length() -> None:
    admissions = AdmissionTracker()
    for number in range(REFRESH_REQUESTS):
        admissions.record(number, admitted=True)
    view = admissions.view
    assert view.edges_tokens == (15, 31, 47)
    assert view.shares == (1.0,) * 4
    assert view.large_tokens == 62
    admissions.record(48, admitted=False)
    view = admissions.view
    assert view.shares == (1.0, 1.0, 1.0, 1 - EWMA_WEIGHT)
    assert view.advantage(47) == pytest.approx(EWMA_WEIGHT)
    assert view.advantage(48) == 0.0
    admissions.record(48, admitted=True)
    assert admissions.view.shares[3] == pytest.approx(1 - EWMA_WEIGHT + EWMA_WEIGHT**2)


def test_what_is_long_follows_the_traffic() -> None:
    admissions = AdmissionTracker()
    for _ in range(REFRESH_REQUESTS):
        admissions.record(100, admitted=True)
    assert admissions.view.edges_tokens == (100, 100, 100)
    for _ in range(20 * REFRESH_REQUESTS):
        admissions.record(1000, admitted=True)
    assert admissions.view.edges_tokens == (1000, 1000, 1000)
