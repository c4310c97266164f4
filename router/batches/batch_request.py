"""A line of a batch: what is asked, and what is written of it."""

from dataclasses import dataclass
from typing import Any

import orjson

from baton.core.priority import Priority
from router.batches.batch import ENDPOINTS
from router.http.nesting import MAX_NESTING, is_nested_deeper

MAX_ID_CHARACTERS = 512

MAX_ERROR_CHARACTERS = 500
"""Of what is said about a wrong line, which repeats parts of it."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """``number`` counts from 0. ``wrong`` says why there is nothing to ask, and ``code`` in a word;
    else ``body`` is asked."""

    number: int
    custom_id: str | None
    body: dict[str, Any]
    wrong: str = ""
    code: str = "invalid_request"


@dataclass(frozen=True, slots=True)
class BatchResponse:
    status: int
    request_id: str
    body: Any


def parse_batch_request(number: int, data: bytes, endpoint: str) -> BatchRequest:
    """Never raises: whatever is wrong with the line is said in it."""
    try:
        value = orjson.loads(data)
    except (ValueError, RecursionError) as error:
        return BatchRequest(number, None, {}, f"the line is no JSON: {error}")
    if not isinstance(value, dict):
        return BatchRequest(number, None, {}, "the line is no JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARACTERS} characters"
        return BatchRequest(number, None, {}, message)
    wrong = _find_error(value, endpoint)
    return BatchRequest(
        number, custom_id, {} if wrong else value["body"], wrong[:MAX_ERROR_CHARACTERS]
    )


def _find_error(value: dict[str, Any], endpoint: str) -> str:
    unknown = value.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        return f"a line has no {min(unknown)!r}, only custom_id, method, url and body"
    if value.get("method") != "POST":
        return f"method is {value.get('method')!r}, and must be 'POST'"
    if value.get("url") != endpoint:
        assert endpoint in ENDPOINTS
        return f"url is {value.get('url')!r}, and the batch's endpoint is {endpoint!r}"
    body = value.get("body")
    if not isinstance(body, dict):
        return "body must be an object"
    if is_nested_deeper(body):
        return f"body is nested deeper than {MAX_NESTING} objects and lists in one another"
    return "an answer in a batch can't be streamed" if body.get("stream") else ""


def encode_request_body(line: BatchRequest) -> bytes:
    """As it is asked: behind everybody else."""
    return orjson.dumps({**line.body, "priority": int(Priority.BATCH) - int(Priority.HIGH)})


def encode_output_line(
    batch_id: str, line: BatchRequest, reply: BatchResponse | None, code: str = "", why: str = ""
) -> bytes:
    """A line of the output, or, without a reply of status 200, of the errors."""
    response = None
    if reply is not None:
        response = {
            "status_code": reply.status, "request_id": reply.request_id, "body": reply.body,
        }  # fmt: skip
    value = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": {"code": code, "message": why} if reply is None else None,
    }
    return orjson.dumps(value) + b"\n"


def parse_request_number(data: bytes) -> int | None:
    """Which line a written one is of; None for one that was not written to its end."""
    try:
        return int(orjson.loads(data)["id"].rpartition("_")[2])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
