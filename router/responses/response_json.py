"""The form in which responses are stored, and the form of their ids.

The stored bytes are a header, which is a line of JSON, then the response as JSON, then its input
items. What a client asks for is sent as it is stored: decoding 8 MB would hold the interpreter
lock, and so the event loop, for 0.1 s, in whatever thread it runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from baton.errors import Invalid
from router.responses.encoded_items import EncodedItems
from router.responses.stored_response import StoredResponse

_RESPONSE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

MAX_HEADER_BYTES = 1024
"""A header has an id of up to 128 characters, a status, and four numbers."""

log = structlog.get_logger(__name__)


def is_response_id(text: str) -> bool:
    """Whether ``text``, which may be any client's input, has the form of a response's id."""
    return _RESPONSE_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A stored response, of which only the header has been decoded."""

    id: str
    status: str
    is_background: bool
    _data: bytes
    _starts: Sequence[int]
    """Where the response, the index of the items and the items begin in ``_data``."""

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    @property
    def response_json(self) -> bytes:
        """The JSON object that the client got."""
        return self._data[self._starts[0] : self._starts[1]]

    @property
    def input_items(self) -> EncodedItems:
        _, index, items = self._starts
        return EncodedItems(self._data[index:items], self._data[items:])

    def decode_response(self) -> dict[str, Any]:
        """Return the response's JSON object. Raises ValueError if it is damaged."""
        response: dict[str, Any] = orjson.loads(self.response_json)
        if not _is_response(response, self.id):
            raise ValueError("the JSON is not that of the response")
        return response

    def decode(self) -> StoredResponse | None:
        """Return the response; if it is damaged, log a warning and return None."""
        try:
            return StoredResponse(self.decode_response(), self.input_items)
        except ValueError:
            log_damage(self.id, self.size_bytes)
            return None


def encode_stored(stored: StoredResponse) -> bytes:
    """Return the response as it is stored. Raises Invalid for a response that can't be written as
    JSON."""
    response, items = encode_response(stored.response), stored.input_items
    header = {
        "id": stored.id,
        "status": stored.status,
        "background": stored.response.get("background") is True,
        "sizes": [len(response), len(items.index), len(items.data)],
    }
    return b"".join((orjson.dumps(header), b"\n", response, items.index, items.data))


def encode_response(response: Mapping[str, Any]) -> bytes:
    """Return the response's JSON object. Raises Invalid, as :func:`encode_stored` does."""
    try:
        return orjson.dumps(dict(response))
    except orjson.JSONEncodeError as error:
        raise not_encodable(error) from error


def read_encoded(data: bytes, response_id: str) -> EncodedResponse | None:
    """Read the header of a stored response. If ``data`` is not a response with this id, log a
    warning and return None."""
    end = data.find(b"\n", 0, MAX_HEADER_BYTES)
    try:
        header = orjson.loads(data[: max(end, 0)])
    except orjson.JSONDecodeError:
        header = None
    if not _is_header(header, response_id, len(data) - end - 1):
        log_damage(response_id, len(data))
        return None
    first, second, _ = header["sizes"]
    starts = (end + 1, end + 1 + first, end + 1 + first + second)
    return EncodedResponse(response_id, header["status"], header["background"], data, starts)


def not_encodable(error: orjson.JSONEncodeError) -> Invalid:
    return Invalid(f"the response can't be stored: {error}", param="store")


def log_damage(response_id: str, size_bytes: int) -> None:
    log.warning("damaged_response", response=response_id, size_bytes=size_bytes)


def _is_header(header: Any, response_id: str, size_bytes: int) -> bool:
    """Return whether this is the header of the response with this id, followed by ``size_bytes``
    bytes."""
    if not isinstance(header, dict):
        return False
    sizes = header.get("sizes")
    return (
        header.get("id") == response_id
        and isinstance(header.get("status"), str)
        and isinstance(header.get("background"), bool)
        and isinstance(sizes, list)
        and len(sizes) == 3
        and all(type(size) is int and size > 0 for size in sizes[:2])
        and type(sizes[2]) is int
        and sizes[2] >= 0
        and sum(sizes) == size_bytes
    )


def _is_response(response: Any, response_id: str) -> bool:
    return (
        isinstance(response, dict)
        and response.get("id") == response_id
        and isinstance(response.get("status"), str)
        and isinstance(response.get("previous_response_id"), str | None)
    )
