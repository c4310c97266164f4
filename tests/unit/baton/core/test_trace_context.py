"""Tests trace contexts: the W3C's format, and span ids that every process derives in the same
way."""

import pytest

from baton.core.trace_context import TRACEPARENT_LENGTH, TraceContext, parse_traceparent

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_traceparent_round_trips() -> None:
    context = parse_traceparent(GIVEN)
    assert context == TraceContext(TRACE_ID, SPAN_ID, is_sampled=True)
    assert context.traceparent == GIVEN
    assert len(GIVEN) == TRACEPARENT_LENGTH


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True)]
)
def test_sampled_flag_is_one_bit(flags: str, sampled: bool) -> None:
    context = parse_traceparent(GIVEN[:-2] + flags)
    assert context is not None and context.is_sampled is sampled


def test_later_versions_may_have_more_fields() -> None:
    later = parse_traceparent(f"01-{TRACE_ID}-{SPAN_ID}-01-what-comes")
    assert later == TraceContext(TRACE_ID, SPAN_ID)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f" {GIVEN}",
        f"{GIVEN}\n",
    ],
)
def test_invalid_traceparents_are_rejected(text: str) -> None:
    assert parse_traceparent(text) is None


def test_child_span_ids_are_deterministic_and_unique() -> None:
    """Another process, or a later version, must derive the same ids."""
    root = TraceContext(TRACE_ID, SPAN_ID)
    assert root.child("attempt", 1).span_id == root.child("attempt", "1").span_id
    ids = {root.child(*names).span_id for names in [("a",), ("b",), ("a", 1), ("a", 2)]}
    assert len(ids) == 4
    assert root.child("a").trace_id == TRACE_ID
    elsewhere = TraceContext("1" * 32, SPAN_ID)
    assert elsewhere.child("a").span_id != root.child("a").span_id
