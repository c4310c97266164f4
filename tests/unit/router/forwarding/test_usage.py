"""Tests reading the usage in answers of servers, however they are cut into pieces."""

import json
from typing import Any

import pytest

from baton.core.ids import RequestId
from baton.core.server_api import ForwardedHead
from router.forwarding.usage import UsageReader
from router.generation.record import GenerationRecord
from router.limits import MAX_EVENT_BYTES, MAX_USAGE_BYTES

JSON = ForwardedHead(200, {"content-type": "application/json"})
STREAM = ForwardedHead(200, {"content-type": "text/event-stream; charset=utf-8"})
USAGE = {
    "prompt_tokens": 9, "total_tokens": 14, "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip
COUNTS = (9, 4, 5)
ESTIMATE = 100


def read(
    head: ForwardedHead, data: bytes, size: int, *, drops_usage: bool = False
) -> tuple[bytes, tuple[int, int | None, int]]:
    """Feed ``data`` in pieces; return what the client gets, and the tokens that are recorded."""
    reader = UsageReader(head, drops_usage=drops_usage)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    got = b"".join([*map(reader.feed, pieces), reader.rest()])
    record = GenerationRecord(RequestId("r"), 0.0, ESTIMATE)
    reader.report(record)
    return got, (record.num_prompt_tokens, record.cached_tokens, record.num_tokens)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_documents_usage_is_read(size: int, separators: tuple[str, str]) -> None:
    text = {"content": 'a "usage":{"prompt_tokens":1} in a text'}
    body = {"choices": [text], "usage": USAGE, "kv_transfer_params": None}
    data = json.dumps(body, separators=separators).encode()
    assert read(JSON, data, size) == (data, COUNTS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"usage": {"prompt_tokens": 7, "total_tokens": 7}}, (7, 0, 0)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": None}}, (7, 0, 0)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 9}}}, (7, 7, 0)),
        ({"usage": {"type": "duration", "seconds": 3}}, (ESTIMATE, 0, 0)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "many"}}, (0, 0, 0)),
        ({"usage": None}, (ESTIMATE, 0, 0)),
        ({"text": "a"}, (ESTIMATE, 0, 0)),
    ],
)
def test_odd_usage_counts_as_far_as_it_is_known(
    body: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert read(JSON, json.dumps(body).encode(), 1000)[1] == expected


@pytest.mark.parametrize("size", [MAX_USAGE_BYTES // 3, 50_000])
def test_the_usage_is_read_wherever_it_is(size: int) -> None:
    much = [0.125] * MAX_USAGE_BYTES
    data = json.dumps({"data": much, "usage": USAGE, "prompt_token_ids": much}).encode()
    assert read(JSON, data, size) == (data, COUNTS)


def test_binary_embeddings_have_their_usage_in_a_header() -> None:
    metadata = json.dumps({"data": [], "usage": USAGE})
    head = ForwardedHead(200, {"content-type": "application/octet-stream", "metadata": metadata})
    data = b"\0" * 2 * MAX_USAGE_BYTES
    assert read(head, data, 1000) == (data, COUNTS)


@pytest.mark.parametrize("size", [1, 2, 13, 10_000])
def test_a_streams_events_are_counted(size: int) -> None:
    data = event(choices=[{"delta": {"content": "a\n\nb"}}]) * 5 + b"data: {"
    reader = UsageReader(STREAM, drops_usage=True)
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    assert reader.num_events == 5


@pytest.mark.parametrize("size", [1, 13, 10_000])
@pytest.mark.parametrize("drops_usage", [False, True])
def test_a_streams_usage_reaches_who_asked_for_it(size: int, drops_usage: bool) -> None:
    words = [event(choices=[{"delta": {"content": f"word {n}"}}], usage=None) for n in range(3)]
    last, done = event(choices=[], usage=USAGE), b"data: [DONE]\n\n"
    got, counts = read(STREAM, b"".join([*words, last, done]), size, drops_usage=drops_usage)
    assert counts == COUNTS
    assert got == b"".join([*words, *([] if drops_usage else [last]), done])


def test_a_stream_that_ends_within_an_event_passes_whole() -> None:
    data = event(choices=[{"delta": {}}]) + b'data: {"choices": ['
    assert read(STREAM, data, 5, drops_usage=True)[0] == data


def test_a_huge_event_is_not_held() -> None:
    data = b"data: " + b"a" * 2 * MAX_EVENT_BYTES
    reader = UsageReader(STREAM, drops_usage=True)
    assert reader.feed(data) == data
