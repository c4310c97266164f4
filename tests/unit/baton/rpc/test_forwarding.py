"""Tests the messages of forwarded requests, also those of a worker that sends odd ones."""

from collections.abc import AsyncIterator, Iterable

import pytest

from baton.core.server_api import ForwardedHead, ForwardRequest
from baton.errors import Invalid, Unavailable
from baton.rpc.convert.forwarding import (
    PIECE_BYTES,
    forward_from_proto,
    forward_to_proto,
    forwarded_from_proto,
    forwarded_to_proto,
)
from baton.rpc.v1 import worker_pb2 as pb


async def stream(messages: Iterable[pb.ForwardRequest]) -> AsyncIterator[pb.ForwardRequest]:
    for message in messages:
        yield message


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 1])
async def test_a_request_travels_in_pieces(size: int) -> None:
    request = ForwardRequest("r/1", "/v1/embeddings", "application/json", b"x" * size, 7)
    messages = list(forward_to_proto(request))
    assert len(messages) == 1 + -(-size // PIECE_BYTES)
    assert await forward_from_proto(stream(messages)) == request


@pytest.mark.parametrize("messages", [[], [pb.ForwardRequest(body=b"a")], [pb.ForwardRequest()]])
async def test_a_request_begins_with_its_head(messages: list[pb.ForwardRequest]) -> None:
    with pytest.raises(Invalid, match="must be its `head`"):
        await forward_from_proto(stream(messages))


def test_other_headers_of_a_worker_are_left_out() -> None:
    head = ForwardedHead(200, {"set-cookie": "a", "metadata": "{}"})
    expected = ForwardedHead(200, {"metadata": "{}"})
    assert forwarded_from_proto(forwarded_to_proto(head), is_first=True) == expected


def test_an_answer_round_trips() -> None:
    head = ForwardedHead(200, {"content-type": "text/event-stream"})
    assert forwarded_from_proto(forwarded_to_proto(head), is_first=True) == head
    assert forwarded_from_proto(forwarded_to_proto(b"\0"), is_first=False) == b"\0"


@pytest.mark.parametrize(
    ("part", "is_first"),
    [
        (b"body", True),
        (ForwardedHead(200, {}), False),
        (ForwardedHead(101, {}), True),
        (ForwardedHead(999, {}), True),
        (ForwardedHead(200, {"content-type": "a\r\nset-cookie: b"}), True),
        (ForwardedHead(200, {"metadata": "naïve"}), True),
    ],
)
def test_odd_answers_of_a_worker_are_not_passed_on(
    part: ForwardedHead | bytes, is_first: bool
) -> None:
    with pytest.raises(Unavailable):
        forwarded_from_proto(forwarded_to_proto(part), is_first=is_first)
