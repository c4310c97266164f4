"""The JSON in which responses are stored, and the form of their ids."""

import re
from typing import Any

import orjson
import structlog

from baton.errors import Invalid
from router.responses.response_store import StoredResponse

_RESPONSE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

log = structlog.get_logger(__name__)


def is_response_id(text: str) -> bool:
    """Whether ``text``, which may be any client's input, has the form of a response's id."""
    return _RESPONSE_ID.fullmatch(text) is not None


def encode_stored(stored: StoredResponse) -> bytes:
    """Return the response as JSON. Raises Invalid for a response that can't be written as JSON."""
    document = {
        "response": dict(stored.response),
        "input_items": [dict(item) for item in stored.input_items],
    }
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise Invalid(f"the response can't be stored: {error}", param="store") from error


def decode_stored(data: bytes, response_id: str) -> StoredResponse | None:
    """Return the response. If ``data`` is not the JSON of a response with this id, log a warning
    and return None."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        document = None
    if not _is_valid(document, response_id):
        log.warning("damaged_response", response=response_id, size_bytes=len(data))
        return None
    return StoredResponse(document["response"], tuple(document["input_items"]))


def _is_valid(document: Any, response_id: str) -> bool:
    if not isinstance(document, dict):
        return False
    response, items = document.get("response"), document.get("input_items")
    return (
        isinstance(response, dict)
        and response.get("id") == response_id
        and isinstance(response.get("status"), str)
        and isinstance(response.get("previous_response_id"), str | None)
        and isinstance(items, list)
        and all(isinstance(item, dict) for item in items)
    )
