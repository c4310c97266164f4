"""Errors in the form that Anthropic's clients expect."""

import re

import orjson

from baton.errors import CONTEXT_LENGTH_EXCEEDED
from router.errors import ApiError, PromptTooLong

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by HTTP status. The status stays Baton's, so that proxies and monitoring see the same
as with OpenAI's API: 503 instead of Anthropic's own 529. Clients retry both."""


def encode_error(error: ApiError, request_id: str) -> bytes:
    """Encode an error. ``request_id`` may be empty."""
    detail = {"type": _error_type(error.status), "message": error_message(error)}
    return orjson.dumps({"type": "error", "error": detail, "request_id": request_id or None})


def encode_error_event(error: ApiError, request_id: str) -> bytes:
    return b"event: error\ndata: " + encode_error(error, request_id) + b"\n\n"


def error_message(error: ApiError) -> str:
    """Return the error's message. It names the invalid field, since Anthropic's errors have no
    separate ``param``."""
    if isinstance(error, PromptTooLong):
        return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    detail = error.body["error"]
    message, param = str(detail["message"]), detail["param"]
    if param is None:
        return message
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return f"prompt is too long: {message}"
    name = field_name(param)
    if param in message:
        return message.replace(param, name, 1)
    return f"{name}: {message}"


def field_name(param: str) -> str:
    """Convert the name of a field to Anthropic's form: ``messages.0.content``."""
    return re.sub(r"\[(\d+)\]", r".\1", param)


def _error_type(status: int) -> str:
    return ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
