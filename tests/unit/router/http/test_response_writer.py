"""Tests how whole responses are sent: in pieces, with their length, as one message if small."""

import pytest
from starlette.types import Message

from baton.errors import DeadlineExceeded
from router.errors import to_api_error
from router.http.response_writer import JSON_HEADERS, ResponseWriter
from router.limits import PIECE_BYTES


class Messages:
    """An ASGI ``send`` that keeps the messages, and fails with the one numbered ``fails_at``."""

    def __init__(self, fails_at: int = -1) -> None:
        self.all: list[Message] = []
        self._fails_at = fails_at

    async def __call__(self, message: Message) -> None:
        if len(self.all) == self._fails_at:
            raise DeadlineExceeded("the answer was not complete within 1 s")
        self.all.append(message)

    @property
    def sizes(self) -> list[int]:
        return [len(message["body"]) for message in self.all[1:]]


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, [0]),
        (1, [1]),
        (PIECE_BYTES, [PIECE_BYTES]),
        (PIECE_BYTES + 1, [PIECE_BYTES, 1]),
        (2 * PIECE_BYTES, [PIECE_BYTES, PIECE_BYTES]),
    ],
)
async def test_a_whole_response_is_sent_in_pieces(size: int, pieces: list[int]) -> None:
    sent, data = Messages(), bytes(index % 251 for index in range(size))
    await ResponseWriter(sent).respond(200, JSON_HEADERS, data)
    assert sent.all[0]["status"] == 200
    assert (b"content-length", str(size).encode()) in sent.all[0]["headers"]
    assert sent.sizes == pieces
    assert b"".join(message["body"] for message in sent.all[1:]) == data
    more = [message["more_body"] for message in sent.all[1:]]
    assert more == [True] * (len(pieces) - 1) + [False]


async def test_no_error_is_appended_to_a_response_of_known_length() -> None:
    sent = Messages(fails_at=2)
    writer = ResponseWriter(sent)
    with pytest.raises(DeadlineExceeded) as raised:
        await writer.respond(200, JSON_HEADERS, bytes(3 * PIECE_BYTES))
    await writer.send_error(to_api_error(raised.value), {})
    assert sent.sizes == [PIECE_BYTES]
    assert sent.all[-1]["more_body"] is True
