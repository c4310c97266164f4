"""Errors in the form that OpenAI clients expect."""

import math
import zlib
from typing import Any

import orjson

from baton.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    Conflict,
    Invalid,
    Overloaded,
    RequestKilledWorkers,
    context_length_message,
    error_mapping,
)
from router.limits import MAX_MESSAGE_CHARACTERS, MAX_RETRY_AFTER_SECONDS, MAX_SPREAD_SECONDS

STATUS_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "timeout",
}

REQUEST_ERROR = "invalid_request_error"


class ApiError(Exception):
    """An error response to a client. ``headers`` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = REQUEST_ERROR,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": _truncate(str(self)),
            "type": self.error_type,
            "param": _truncate(self.param) if self.param is not None else None,
            "code": self.code,
        }
        return {"error": error}

    @property
    def json(self) -> bytes:
        return orjson.dumps(self.body)


def invalid_field(field: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error (400) for the field ``field`` of a request. The message names the field."""
    return ApiError(400, message, param=field or None, code=code)


class PromptTooLong(ApiError):
    """A prompt leaves no room for an answer in the model's context. ``num_tokens`` is its length,
    or as much of it as was counted."""

    def __init__(self, problem: str, *, num_tokens: int, context_tokens: int, param: str) -> None:
        message = context_length_message(context_tokens, problem)
        super().__init__(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)
        self.num_tokens = num_tokens
        self.max_tokens = context_tokens - 1


def not_json(what: str, reason: object) -> str:
    """Return the message about a body, or a line of a file, that is not JSON. ``reason`` is the
    parser's message; where it speaks of hex escapes, half of a character is meant."""
    if "hex escape" in str(reason) or "surrogate" in str(reason):
        reason = (
            "a string has half of a surrogate pair (\\ud83d, for example, without the other half), "
            f"which is not a character: {reason}"
        )
    return f"{what} is not JSON: {reason}"


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Convert any exception to an API error. The text of an internal error is not sent to clients.
    ``request_id`` decides when a refused client should retry, so that not all of them do at the
    same time."""
    if isinstance(error, ApiError):
        return error
    mapping = error_mapping(error)
    if mapping.grpc_status == "INTERNAL":
        return ApiError(500, "internal error", error_type=mapping.openai_type)
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers |= retry_headers(_spread_retry(error.retry_after_seconds, request_id))
    if isinstance(error, Conflict | RequestKilledWorkers):
        headers["x-should-retry"] = "false"  # OpenAI's clients would otherwise retry 409 and 500
        message, kind = str(error), mapping.openai_type
        return ApiError(
            mapping.http_status, message, error_type=kind, code=error.code, headers=headers
        )
    param, code = (error.param, error.code) if isinstance(error, Invalid) else (None, None)
    return ApiError(
        mapping.http_status,
        str(error) or type(error).__name__,
        error_type=mapping.openai_type,
        param=param,
        code=code or STATUS_CODES.get(mapping.http_status),
        headers=headers,
    )


def retry_headers(seconds: float) -> dict[str, str]:
    """Return the headers that say when to retry. OpenAI's clients prefer ``retry-after-ms`` to
    ``retry-after``, which is in whole seconds."""
    return {
        "retry-after": str(max(math.ceil(seconds), 1)),
        "retry-after-ms": str(max(math.ceil(seconds * 1000), 1)),
    }


def _spread_retry(seconds: float, request_id: str) -> float:
    """Return a time between ``seconds`` and twice as long, but at most ``MAX_SPREAD_SECONDS``
    longer; the request's id determines it. ``seconds`` counts as 1 if it is less, or if a peer sent
    NaN or a value out of range."""
    if not 1 <= seconds <= MAX_RETRY_AFTER_SECONDS:
        seconds = 1.0
    fraction = zlib.crc32(request_id.encode()) / 2**32
    return seconds + min(seconds, MAX_SPREAD_SECONDS) * fraction


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "…"
