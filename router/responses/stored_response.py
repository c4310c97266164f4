"""A response and the input that it answers, and the form in which both are stored.

The stored bytes are a header, which is a line of JSON, then the response as JSON, then its input
items. What a client asks for is sent as it is stored: decoding 8 MB would hold the interpreter
lock, and so the event loop, for 0.1 s, in whatever thread it runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson
import structlog

from baton.errors import Invalid


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """One item: the bytes from ``start`` to ``end`` of ``data``."""

    id: str
    data: bytes
    start: int
    end: int

    @property
    def json(self) -> orjson.Fragment:
        return orjson.Fragment(self.data[self.start : self.end])


@dataclass(frozen=True, slots=True)
class EncodedItems:
    """``data`` has the JSON of all items, one after the other. ``index`` is a JSON object with the
    ``ids`` and the ``sizes`` (in bytes) of the items, so that a page of the items can be sent
    without decoding any of them."""

    index: bytes
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.index) + len(self.data)

    def split(self) -> list[EncodedItem]:
        """Return the items, not decoded. Raises ValueError if the index is damaged."""
        index = orjson.loads(self.index)
        if not _is_index(index, len(self.data)):
            raise ValueError("the index does not fit the items")
        ends = list(accumulate(index["sizes"]))
        return [
            EncodedItem(item_id, self.data, start, end)
            for item_id, start, end in zip(index["ids"], [0, *ends], ends, strict=False)
        ]

    def decode(self) -> list[dict[str, Any]]:
        """Return the items. Raises ValueError if they are damaged. Each item is decoded by itself,
        so that other threads can run in between: the decoder holds the interpreter lock."""
        items = [orjson.loads(self.data[item.start : item.end]) for item in self.split()]
        if not all(isinstance(item, dict) for item in items):
            raise ValueError("an item is not an object")
        return items


def encode_items(items: Sequence[Mapping[str, Any]]) -> EncodedItems:
    """Encode the items, each by itself as in :meth:`EncodedItems.decode`. Raises
    orjson.JSONEncodeError."""
    parts = [orjson.dumps(dict(item)) for item in items]
    index = {"ids": [str(item.get("id")) for item in items], "sizes": list(map(len, parts))}
    return EncodedItems(orjson.dumps(index), b"".join(parts))


def _is_index(index: Any, size_bytes: int) -> bool:
    if not isinstance(index, dict):
        return False
    ids, sizes = index.get("ids"), index.get("sizes")
    return (
        isinstance(ids, list)
        and isinstance(sizes, list)
        and len(ids) == len(sizes)
        and all(isinstance(item_id, str) for item_id in ids)
        and all(type(size) is int and size > 0 for size in sizes)
        and sum(sizes) == size_bytes
    )


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``response`` is the JSON object that the client got, with its ``id``, ``status``, ``output``
    and ``previous_response_id``. ``input_items`` are the items of this request alone, in the form
    in which ``GET /v1/responses/ID/input_items`` lists them; the items of earlier turns belong to
    earlier responses. They are encoded only once, though a background response is stored several
    times."""

    response: Mapping[str, Any]
    input_items: EncodedItems

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])


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
