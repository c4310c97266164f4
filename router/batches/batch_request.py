"""One request of a batch: parsing its line, and encoding its body and its result."""

from dataclasses import dataclass
from typing import Any

import orjson

from baton.core.priority import Priority
from router.batches.batch import ENDPOINTS
from router.errors import ApiError, not_json
from router.http.json_limits import check_json_size
from router.http.nesting import is_nested_deeper
from router.limits import MAX_CUSTOM_ID_CHARACTERS, MAX_LINE_ERROR_CHARACTERS, MAX_NESTING

INVALID_REQUEST = "invalid_request"
"""The error code of an invalid line, unless the check that failed has a code of its own."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of a batch's input file. ``number`` counts lines from 0; ``offset`` is where the line
    begins and ``size`` its length, both in bytes."""

    number: int
    offset: int
    size: int


@dataclass(slots=True)
class BatchRequest:
    """A request of a batch. If its line is invalid, ``error`` is the message and ``error_code`` the
    error code; otherwise ``body`` is the encoded body, until it is taken or dropped."""

    line: InputLine
    custom_id: str | None
    body: bytes = b""
    error: str = ""
    error_code: str = INVALID_REQUEST

    @property
    def number(self) -> int:
        return self.line.number

    def take_body(self) -> bytes:
        """Return the body and drop this object's reference to it, so that it can be freed while the
        request runs. The body can be read again from the input file."""
        body, self.body = self.body, b""
        return body


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """A response to a request. ``body`` is JSON without line breaks."""

    status: int
    request_id: str
    body: bytes


def parse_batch_request(
    line: InputLine, data: bytes, endpoint: str, max_values: int
) -> BatchRequest:
    """Parse a line, unless its JSON has too many values or strings, and encode its body. Never
    raises: an invalid line becomes a request with an error message."""
    try:
        check_json_size(data, max_values)
        value = orjson.loads(data)
    except ApiError as error:
        return BatchRequest(line, None, error=str(error), error_code=error.code or INVALID_REQUEST)
    except (ValueError, RecursionError) as error:
        return BatchRequest(line, None, error=not_json("the line", error))
    if not isinstance(value, dict):
        return BatchRequest(line, None, error="the line is not a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
        return BatchRequest(line, None, error=message)
    wrong = _find_error(value, endpoint)
    if wrong:
        return BatchRequest(line, custom_id, error=wrong[:MAX_LINE_ERROR_CHARACTERS])
    return BatchRequest(line, custom_id, _encode_body(value["body"]))


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


def _encode_body(body: dict[str, Any]) -> bytes:
    """Encode a request's body, with the lowest priority added."""
    return orjson.dumps({**body, "priority": int(Priority.BATCH) - int(Priority.HIGH)})


def encode_output_line(
    batch_id: str, request: BatchRequest, reply: BatchResponse | None, code: str = "", why: str = ""
) -> bytes:
    """Encode a result as a line for the output file (if the response has status 200) or for the
    error file."""
    response = None
    if reply is not None:
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": orjson.Fragment(reply.body),
        }
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
