"""Errors about a chat, in terms of the request that the chat was made from."""

import re
from collections.abc import Sequence

from router.errors import ApiError

FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The chat's fields that have another name in the Responses API."""

_FIELD = re.compile(rf"\b({'|'.join(FIELDS)})\b")
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def translate_error(error: ApiError, message_paths: Sequence[str]) -> ApiError:
    """Return the error with the names of the request's fields."""

    def path(match: re.Match[str]) -> str:
        number = int(match[1])
        return message_paths[number] if number < len(message_paths) else "input"

    def translate(text: str) -> str:
        return _FIELD.sub(lambda match: FIELDS[match[1]], _MESSAGE.sub(path, text))

    return ApiError(
        error.status,
        translate(str(error)),
        error_type=error.error_type,
        param=translate(error.param) if error.param is not None else None,
        code=error.code,
        headers=error.headers,
    )
