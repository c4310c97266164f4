"""One request of a batch: parsing its line, and encoding its result."""

from dataclasses import dataclass
from typing import Any

import orjson

from baton.core.priority import Priority
from router.batches.batch import ENDPOINTS
from router.http.nesting import MAX_NESTING, is_nested_deeper

MAX_ID_CHARACTERS = 512

MAX_ERROR_CHARACTERS = 500
"""The maximum number of characters of an error message about an invalid line, since it repeats
parts of the line."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch. ``number`` counts lines from 0. If the line is invalid, ``error`` is
    the message and ``error_code`` the error code; otherwise ``body`` is the request's body."""

    number: int
    custom_id: str | None
    body: dict[str, Any]
    error: str = ""
    error_code: str = "invalid_request"


@dataclass(frozen=True, slots=True)
class BatchResponse:
    status: int
    request_id: str
    body: Any


def parse_batch_request(number: int, data: bytes, endpoint: str) -> BatchRequest:
    """Parse a line. Never raises: an invalid line becomes a request with an error message."""
    try:
        value = orjson.loads(data)
    except (ValueError, RecursionError) as error:
        return BatchRequest(number, None, {}, f"the line is not JSON: {error}")
    if not isinstance(value, dict):
        return BatchRequest(number, None, {}, "the line is not a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARACTERS} characters"
        return BatchRequest(number, None, {}, message)
    wrong = _find_error(value, endpoint)
    return BatchRequest(
        number, custom_id, {} if wrong else value["body"], wrong[:MAX_ERROR_CHARACTERS]
    )


def _find_error(request: dict[str, Any], endpoint: str) -> str:
    unknown = request.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        return f"unknown field {min(unknown)!r}; a line must have custom_id, method, url and body"
    if request.get("method") != "POST":
        return f"method is {request.get('method')!r}; it must be 'POST'"
    if request.get("url") != endpoint:
        assert endpoint in ENDPOINTS
        return f"url is {request.get('url')!r}; it must be the batch's endpoint, {endpoint!r}"
    body = request.get("body")
    if not isinstance(body, dict):
        return "body must be an object"
    if is_nested_deeper(body):
        return f"body is nested deeper than {MAX_NESTING} levels"
    return "stream must be false in a batch" if body.get("stream") else ""


def encode_request_body(request: BatchRequest) -> bytes:
    """Encode the request's body, with the lowest priority added."""
    return orjson.dumps({**request.body, "priority": int(Priority.BATCH) - int(Priority.HIGH)})


def encode_output_line(
    batch_id: str, request: BatchRequest, reply: BatchResponse | None, code: str = "", why: str = ""
) -> bytes:
    """Encode a result as a line for the output file (if the response has status 200) or for the
    error file."""
    response = None
    if reply is not None:
        response = {
            "status_code": reply.status, "request_id": reply.request_id, "body": reply.body,
        }  # fmt: skip
    value = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{request.number}",
        "custom_id": request.custom_id,
        "response": response,
        "error": {"code": code, "message": why} if reply is None else None,
    }
    return orjson.dumps(value) + b"\n"


def parse_request_number(data: bytes) -> int | None:
    """Return the request number of a result line; None for an incomplete line."""
    try:
        return int(orjson.loads(data)["id"].rpartition("_")[2])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
