"""Errors in the form that Anthropic's clients expect."""

import re

import orjson

from router.errors import ApiError

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

FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""The names of fields in Anthropic's requests, by the names that these fields have in chats."""

UNSUPPORTED = "unsupported_parameter"
"""The code of errors about a field that this API does not have. Such an error already has the name
that the client used."""


def encode_error(error: ApiError, request_id: str) -> bytes:
    """Encode an error. ``request_id`` may be empty."""
    detail = {"type": _error_type(error.status), "message": error_message(error)}
    return orjson.dumps({"type": "error", "error": detail, "request_id": request_id or None})


def encode_error_event(error: ApiError, request_id: str) -> bytes:
    return b"event: error\ndata: " + encode_error(error, request_id) + b"\n\n"


def error_message(error: ApiError) -> str:
    """Return the error's message. It names the invalid field, since Anthropic's errors have no
    separate ``param``."""
    detail = error.body["error"]
    message, param = str(detail["message"]), detail["param"]
    if param is None:
        return message
    name = field_name(param if error.code == UNSUPPORTED else FIELD_NAMES.get(param, param))
    if param in message:
        return message.replace(param, name, 1)
    return f"{name}: {message}"


def field_name(param: str) -> str:
    """Convert the name of a field to Anthropic's form: ``messages.0.content``."""
    param = param.replace(".function.parameters", ".input_schema")
    return re.sub(r"\[(\d+)\]", r".\1", param)


def _error_type(status: int) -> str:
    return ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
